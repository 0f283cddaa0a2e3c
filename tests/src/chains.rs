//! Stacks of Ruby and native frames, and what they must be, written down in one
//! line whatever the Ruby and the frames that are shown.
//!
//! A chain has its outermost frame first, and `;` between the frames:
//!
//! | written | is |
//! |---|---|
//! | `Parts.cpu` | a method, or a block, by its label |
//! | `:burn_leaf` | a function of the extension |
//! | `~` | one or more functions of the interpreter, where those are shown |
//! | `^` | what starts a Ruby thread, where that is shown: the interpreter's and the C library's |
//! | `$` | what starts a thread that runs no Ruby, always shown: the C library's |

use rbprof::presentation::NativeFrames;
use rbprof::profile::FunctionKind;
use rbprof::symbolize::Resolved;

use crate::frames::Jit;
use crate::pprof::Counted;
use crate::pprof::Read;

/// Stands where the native stack was lost.
const CUT: &str = "(native frames missing)";
/// The extension's file.
const EXTENSION: &str = "burn.so";
/// What the extension calls to look at the clock, when that is not inlined.
const CLOCK: [&str; 2] = ["cpu_time_ns", "deadline_after"];

/// What a frame is to a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// A method or a block, by its label.
    Method(String),
    /// A word of rbprof's own.
    Marker(String),
    /// A function of the extension, by its name.
    Extension(String),
    /// The interpreter's own code, or what a JIT made.
    Interpreter,
    /// The C library, the dynamic linker, the vDSO.
    Libc,
    /// The kernel.
    Kernel,
    /// Of another file.
    Other(String),
}

impl Link {
    fn of(frame: &Resolved, profile: &Read) -> Self {
        let label = &*frame.function.label;
        match frame.function.kind {
            FunctionKind::Ruby | FunctionKind::CFunction => Self::Method(label.to_owned()),
            FunctionKind::Marker => Self::Marker(label.to_owned()),
            FunctionKind::Kernel => Self::Kernel,
            FunctionKind::Native => {
                let path = profile.object(frame).unwrap_or_default();
                let name = path.rsplit('/').next().unwrap_or(path);
                if name == EXTENSION {
                    Self::Extension(label.to_owned())
                } else if name.starts_with("libruby")
                    || name.starts_with("ruby")
                    || name == "[anonymous]"
                {
                    Self::Interpreter
                } else if ["libc", "libpthread", "ld-", "[vdso]"]
                    .iter()
                    .any(|libc| name.starts_with(libc))
                {
                    Self::Libc
                } else {
                    Self::Other(path.to_owned())
                }
            }
        }
    }

    /// A sample's, outermost first. Where native frames are missing, that is
    /// counted elsewhere.
    #[must_use]
    pub fn all(sample: &Counted, profile: &Read) -> Vec<Self> {
        let frames = sample.frames.iter().rev();
        frames
            .filter(|frame| &*frame.function.label != CUT)
            .map(|frame| Self::of(frame, profile))
            .collect()
    }
}

/// How stacks were recorded.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Which native frames are shown.
    pub native: NativeFrames,
    /// Compiled code calls methods in C without the interpreter, which it may
    /// also come back to wherever it wants.
    pub jit: Jit,
    /// The extension has no symbols.
    pub stripped: bool,
}

/// Whether a stack is that chain, with nothing on top but the clock that it looks
/// at, and the kernel.
#[must_use]
pub fn is(stack: &[Link], chain: &str, view: View) -> bool {
    rest(stack, chain, view).is_some_and(|rest| {
        // What runs a method of Ruby is the interpreter.
        let in_ruby = chain
            .rsplit(';')
            .next()
            .is_some_and(|last| !last.starts_with(':'));
        rest.iter().all(|link| match link {
            Link::Libc | Link::Kernel => true,
            Link::Extension(name) => {
                view.stripped && name == "[burn.so]" || CLOCK.contains(&name.as_str())
            }
            Link::Interpreter => in_ruby && view.native == NativeFrames::All,
            Link::Method(_) | Link::Marker(_) | Link::Other(_) => false,
        })
    })
}

/// What is on top of the chain that a stack begins with; `None` if it begins in
/// another way.
#[must_use]
pub fn rest<'a>(stack: &'a [Link], chain: &str, view: View) -> Option<&'a [Link]> {
    let mut rest = stack;
    let everything = view.native == NativeFrames::All;
    for expected in chain.split(';') {
        match expected {
            "^" if everything => {
                rest = some_of(rest, |link| matches!(link, Link::Interpreter | Link::Libc))?;
            }
            "~" if everything && view.jit == Jit::Off => {
                rest = some_of(rest, |link| *link == Link::Interpreter)?;
            }
            "~" | "^" => {}
            "$" if view.native == NativeFrames::None => {}
            "$" => rest = some_of(rest, |link| *link == Link::Libc)?,
            expected => {
                if everything && view.jit != Jit::Off {
                    rest = some_of(rest, |link| *link == Link::Interpreter).unwrap_or(rest);
                }
                let (link, above) = match (rest.split_first(), expected.strip_prefix(':')) {
                    (_, Some(_)) if view.native == NativeFrames::None => continue,
                    (first, _) => first?,
                };
                let fits = match (link, expected.strip_prefix(':')) {
                    (Link::Extension(label), Some(_)) if view.stripped => label == "[burn.so]",
                    (Link::Extension(label), Some(name)) => label == name,
                    (Link::Method(label), None) => label == expected,
                    _ => false,
                };
                if !fits {
                    return None;
                }
                rest = above;
            }
        }
    }
    Some(rest)
}

/// What comes after one or more of those.
fn some_of(links: &[Link], is_one: impl Fn(&Link) -> bool) -> Option<&[Link]> {
    let count = links.iter().take_while(|link| is_one(link)).count();
    if count == 0 {
        return None;
    }
    links.get(count..)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAIN: &str = "^;<main>;Burn.cpu;~;:burn_cpu;:burn_leaf";

    fn view(native: NativeFrames) -> View {
        View {
            native,
            jit: Jit::Off,
            stripped: false,
        }
    }

    fn links(stack: &str) -> Vec<Link> {
        stack
            .split(' ')
            .map(|link| match (link, link.strip_prefix(':')) {
                ("I", _) => Link::Interpreter,
                ("L", _) => Link::Libc,
                ("K", _) => Link::Kernel,
                (_, Some(name)) => Link::Extension(name.to_owned()),
                (label, None) => Link::Method(label.to_owned()),
            })
            .collect()
    }

    #[test]
    fn a_chain_is_nothing_but_itself() {
        let extensions = view(NativeFrames::Extensions);
        for (stack, expected) in [
            ("<main> Burn.cpu :burn_cpu :burn_leaf", true),
            ("<main> Burn.cpu :burn_cpu :burn_leaf L L K K", true),
            ("<main> Burn.cpu :burn_cpu :burn_leaf :cpu_time_ns K", true),
            ("<main> Burn.cpu :burn_cpu", false),
            ("<main> Burn.cpu :burn_leaf :burn_cpu", false),
            ("<main> :burn_cpu :burn_leaf", false),
            ("<main> Burn.cpu :burn_cpu :burn_cpu :burn_leaf", false),
            ("<main> Burn.cpu :burn_cpu :burn_leaf :burn_leaf", false),
            ("<main> Burn.cpu I :burn_cpu :burn_leaf", false),
            ("L I <main> Burn.cpu :burn_cpu :burn_leaf", false),
            ("<main> Burn.cpu :burn_cpu L :burn_leaf", false),
            ("<main> Burn.cpu :burn_cpu :burn_leaf I", false),
        ] {
            assert_eq!(is(&links(stack), CHAIN, extensions), expected, "{stack}");
        }
        let all = view(NativeFrames::All);
        for (stack, expected) in [
            ("I L I <main> Burn.cpu I I :burn_cpu :burn_leaf K", true),
            ("I L I <main> Burn.cpu :burn_cpu :burn_leaf", false),
            ("<main> Burn.cpu I :burn_cpu :burn_leaf", false),
            ("I <main> I Burn.cpu I :burn_cpu :burn_leaf", false),
            ("I <main> Burn.cpu I L :burn_cpu :burn_leaf", false),
        ] {
            assert_eq!(is(&links(stack), CHAIN, all), expected, "{stack}");
        }
        let none = view(NativeFrames::None);
        assert!(is(&links("<main> Burn.cpu"), CHAIN, none));
        assert!(!is(&links("<main> Burn.cpu :burn_cpu"), CHAIN, none));
        let thread = "$;:thread_main";
        assert!(is(&links("L L :thread_main"), thread, extensions));
        assert!(!is(&links(":thread_main"), thread, extensions));
        assert!(!is(&links("L I :thread_main"), thread, extensions));
    }
}

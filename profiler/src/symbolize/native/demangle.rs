//! Names of C++ and Rust functions as their authors wrote them.

use std::fmt;
use std::fmt::Write as _;

/// Longest name that is taken apart, bytes.
const MAX_MANGLED: usize = 2048;
/// Longest label, bytes: a short mangled name can stand for a very long one.
const MAX_LABEL: usize = 1024;

/// The label of a symbol: without Rust's hash, and with ` […]` at the end of what
/// was too long. What is no mangled name is its own label.
pub(super) fn label(symbol: &str) -> String {
    let mut label = Bounded::default();
    if symbol.len() <= MAX_MANGLED {
        if let Ok(rust) = rustc_demangle::try_demangle(symbol) {
            // Without the alternate form comes the hash.
            let written = write!(label, "{rust:#}");
            if written.is_ok() || label.full {
                return label.finish();
            }
            label = Bounded::default();
        }
        // Only names of this form: the parser takes `f` for the type `float`.
        if symbol.starts_with("_Z") || symbol.starts_with("__Z") {
            if let Ok(cpp) = cpp_demangle::Symbol::new(symbol) {
                let options = cpp_demangle::DemangleOptions::default();
                let written = cpp.structured_demangle(&mut label, &options);
                if written.is_ok() || label.full {
                    return label.finish();
                }
            }
            label = Bounded::default();
        }
    }
    label.push(symbol);
    label.finish()
}

/// Text up to a length; what goes beyond ends the writing with an error.
#[derive(Default)]
struct Bounded {
    text: String,
    full: bool,
}

impl Bounded {
    fn push(&mut self, text: &str) {
        let room = MAX_LABEL.saturating_sub(self.text.len());
        if text.len() <= room {
            self.text.push_str(text);
        } else {
            let end = text.floor_char_boundary(room);
            self.text.push_str(text.get(..end).unwrap_or(""));
            self.full = true;
        }
    }

    fn finish(mut self) -> String {
        if self.full {
            self.text.push_str(" […]");
        }
        self.text
    }
}

impl fmt::Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text);
        if self.full { Err(fmt::Error) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_their_authors_wrote_them() {
        for (symbol, expected) in [
            ("rb_ary_push", "rb_ary_push"),
            ("f", "f"),
            ("_ZN4core3fmt5write17h0123456789abcdefE", "core::fmt::write"),
            ("_RNvCs1234_7mycrate3foo", "mycrate::foo"),
            (
                "_ZN3re23RE2C1ERKNSt3__112basic_stringIcEE",
                "re2::RE2::RE2(std::__1::basic_string<char> const&)",
            ),
            ("_ZNSt6vectorIiE", "_ZNSt6vectorIiE"),
            ("_Znwm", "operator new(unsigned long)"),
        ] {
            assert_eq!(label(symbol), expected);
        }
    }

    #[test]
    fn a_short_name_of_a_long_one_is_cut() {
        // Each substitution doubles the one before it.
        let mut bomb = "_Z1f".to_owned();
        bomb.push_str("St4pairIiiE");
        for n in 0..20 {
            let of = if n == 0 {
                "S_".to_owned()
            } else {
                format!(
                    "S{}_",
                    char::from_digit(n - 1, 36).unwrap().to_ascii_uppercase()
                )
            };
            bomb.push_str(&format!("St4pairI{of}{of}E"));
        }
        let cut = label(&bomb);
        assert!(cut.len() <= MAX_LABEL + 8, "{}", cut.len());
        assert!(cut.ends_with(" […]"), "{cut}");
        let long = label(&"é".repeat(2000));
        assert!(long.ends_with("é […]") && long.len() <= MAX_LABEL + 8);
    }

    #[test]
    fn names_made_to_do_harm_do_none() {
        let fill = |start: &str, middle: &str, end: &str| {
            let times = (MAX_MANGLED - start.len() - end.len()) / middle.len();
            format!("{start}{}{end}", middle.repeat(times))
        };
        let names = [
            // Deep ones, for the stack.
            ("_Z1f", "P", "i"),
            ("_Z1f", "FP", "i"),
            ("_Z1fI", "X", ""),
            ("_Z1fIX", "ad", "L_Z1gEEE"),
            ("_Z1fIX", "pp", "1aEEvv"),
            ("_ZZ", "Z", "1fvE"),
            ("_ZN", "1aI", "i"),
            ("_Z1fIX", "cl", "EEv"),
            ("_Z1fDT", "clcv", "iEv"),
            ("_R", "Nv", "C1a1b"),
            ("_R", "I", "C1aE"),
            ("_RIC1a", "R", "uE"),
            ("_RIC1a", "FG_", "uE"),
            // Those that refer to what came before, for the time.
            ("_Z1f", "S_", ""),
            ("_Z1fSt4pairIiiE", "St4pairIS0_S0_E", ""),
            ("_RINvC1a1bT", "B2_", "EE"),
            ("_RINvC1a1b", "TB2_B2_E", "E"),
            ("_Z1fI", "Li1E", "EvT_"),
            ("_Z1fI", "J", "EvDpT_"),
        ];
        let started = std::time::Instant::now();
        // A stack like that of the thread that does it.
        let thread = std::thread::Builder::new().stack_size(super::super::STACK);
        let longest = thread.spawn(move || {
            let labels = names.map(|(start, middle, end)| label(&fill(start, middle, end)));
            labels.iter().map(String::len).max()
        });
        assert!(longest.unwrap().join().unwrap().unwrap() <= MAX_LABEL + 8);
        assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    }
}

//! From an execution context to frames.
//!
//! | module | what it does |
//! |---|---|
//! | [`ruby`] | one step: a control frame, or one environment of the search for its method entry |
//! | [`native`] | one step: the object and the rule for an address, and on to the caller |
//! | [`merged`] | both stacks as one |
//!
//! A step is small and holds its state in a [`ruby::RubyWalk`], so that the
//! driver decides how to loop: `bpf_loop` on kernels that have it, bounded
//! loops chained by tail calls on those that do not, a plain loop on the host.
//! A frame with the FINISH flag ends an activation of `rb_vm_exec` and is
//! reported as such ([`ruby::Step::ActivationEnd`]); that is the place where a
//! merged walk goes on with native frames.

pub mod merged;
pub mod native;
pub mod ruby;

use crate::Memory;
use crate::layout::WalkLayout;
use crate::memory::WINDOW_WORDS;
use crate::memory::Window;
use crate::roots::Context;
use crate::wire::Frame;

/// Where a walk puts its frames, leaf first.
pub trait FrameSink {
    /// Takes the next frame; `false` when there is no room for it.
    fn push(&mut self, frame: Frame) -> bool;
}

/// Method entries remembered per CPU; see [`Scratch::entries`].
pub const KNOWN_ENTRIES: usize = 256;

/// Working memory of a walk, too large for a BPF stack.
#[repr(C)]
pub struct Scratch {
    /// A stretch of control frames.
    pub frames: Window,
    /// A stretch of the value stack, where environments live.
    pub values: Window,
    /// Objects already seen to be method entries, by address: saves a read for
    /// every frame of a known method. A stale entry does no harm, since user
    /// space looks at the object again before it believes it.
    pub entries: [u64; KNOWN_ENTRIES],
}

impl Scratch {
    /// Empty working memory.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            frames: [0; WINDOW_WORDS],
            values: [0; WINDOW_WORDS],
            entries: [0; KNOWN_ENTRIES],
        }
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// Walks to the end in a plain loop and returns the [`sample_flags`] of the
/// stack.
///
/// [`sample_flags`]: crate::wire::sample_flags
pub fn walk_all<M: Memory, S: FrameSink>(
    context: &Context,
    layout: &WalkLayout,
    memory: &M,
    scratch: &mut Scratch,
    sink: &mut S,
) -> u32 {
    let mut walk = ruby::RubyWalk::start(context, layout);
    for _ in 0..ruby::MAX_STEPS {
        if walk.step(memory, scratch, sink) == ruby::Step::Done {
            return walk.flags;
        }
    }
    walk.give_up()
}

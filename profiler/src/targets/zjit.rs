//! Whether ZJIT is on in a process.
//!
//! With ZJIT on, frames are read in another way (see
//! [`Layout::zjit`](rbprof_common::layout::Layout::zjit)); other JIT compilers
//! keep return addresses in the same place. Ruby's own test is
//! `rb_zjit_entry != 0` (`zjit.h`): the address of the code that enters ZJIT,
//! written once, when it is enabled. The variable is not exported. Where no
//! symbol shows it, the frames of the threads tell: `jit_return` is a mark that
//! is no address in the frame of a C method, and points to the place of a frame
//! of ZJIT's in another.
//!
//! From Ruby's sources, not proven on a live process. A ZJIT that is enabled
//! after this look (`RubyVM::ZJIT.enable`) is not noticed.

use rbprof_common::Fault;
use rbprof_common::Memory;
use rbprof_common::layout::WalkLayout;
use rbprof_common::layout::fixed;
use rbprof_common::layout::imemo;
use rbprof_common::layout::object_type;
use rbprof_common::roots::Context;

/// The variable that tells.
pub(super) const ENTRY: &[u8] = b"rb_zjit_entry";
/// Frames looked at for each thread.
const MAX_FRAMES: usize = 1024;

/// Whether ZJIT is on, and how that was found; `None` where nothing tells: no
/// frame that machine code runs, and no symbol.
pub(super) fn is_on<M: Memory>(
    entry: Option<u64>,
    contexts: &[Context],
    layout: &WalkLayout,
    memory: &M,
) -> Option<(bool, &'static str)> {
    if let Some(entry) = entry.and_then(|variable| memory.word(variable).ok()) {
        return Some((entry != 0, "rb_zjit_entry"));
    }
    let mut seen = false;
    for context in contexts {
        let size = u64::from(layout.cfp_size.max(1));
        let frames = (context.cfp..context.stack_end).step_by(size as usize);
        for cfp in frames.take(MAX_FRAMES) {
            let jit_return = memory.word(cfp.wrapping_add(layout.jit_return.into()));
            match jit_return {
                Err(Fault) | Ok(0) => {}
                Ok(fixed::JIT_RETURN_C_FRAME) => return Some((true, "a C method's frame")),
                Ok(place) if is_frame(place, memory) == Ok(true) => {
                    return Some((true, "a frame of ZJIT's"));
                }
                Ok(_) => seen = true,
            }
        }
    }
    seen.then_some((false, "frames of another JIT compiler"))
}

/// Whether there is a frame of ZJIT's before that place: its sequence is one.
fn is_frame<M: Memory>(place: u64, memory: &M) -> Result<bool, Fault> {
    if !place.is_multiple_of(8) {
        return Ok(false);
    }
    let frame = memory.word(place.wrapping_sub(fixed::JIT_RETURN_FRAME))?;
    let [_, iseq, _] = memory.words3(frame)?;
    let flags = memory.word(iseq)?;
    Ok(flags & object_type::MASK == object_type::IMEMO && imemo::of(flags) == imemo::ISEQ)
}

#[cfg(test)]
mod tests {
    use rbprof_common::layout::LAYOUTS;

    use super::*;
    use crate::targets::tests::Words;

    const VARIABLE: u64 = 0x1000;
    const STACK_END: u64 = 0x9000;
    const NATIVE: u64 = 0x7fff_0000;
    const FRAME: u64 = 0x2000;
    const ISEQ: u64 = 0x3000;

    /// What is said of two frames with these words in `jit_return`.
    fn said(entry: Option<u64>, words: [u64; 2]) -> Option<(bool, &'static str)> {
        let layout = LAYOUTS.iter().find(|layout| layout.zjit).unwrap().walk;
        let cfp = STACK_END - 2 * 56;
        let mut memory = Words(
            [
                (cfp + 48, words[0]),
                (cfp + 56 + 48, words[1]),
                (NATIVE - 8, FRAME),
                (FRAME, 0x5555),
                (FRAME + 8, ISEQ),
                (FRAME + 16, 0),
                (ISEQ, object_type::IMEMO | imemo::ISEQ << 12),
                // Machine code, as words.
                (0x4000_0000 - 8, 0x1234_5678_9abc_def0),
            ]
            .into(),
        );
        if let Some(entry) = entry {
            memory.0.insert(VARIABLE, entry);
        }
        let context = Context {
            ec: 0,
            stack: 0x8000,
            stack_end: STACK_END,
            cfp,
        };
        is_on(Some(VARIABLE), &[context], &layout, &memory)
    }

    #[test]
    fn the_variable_tells_where_there_is_one() {
        assert_eq!(
            said(Some(0x4000_0000), [0, 0]),
            Some((true, "rb_zjit_entry"))
        );
        assert_eq!(
            said(Some(0), [0x4000_0001, 0]),
            Some((false, "rb_zjit_entry"))
        );
    }

    #[test]
    fn else_the_frames_tell() {
        assert_eq!(said(None, [0, 0]), None);
        assert_eq!(said(None, [0, 1]), Some((true, "a C method's frame")));
        assert_eq!(said(None, [NATIVE, 0]), Some((true, "a frame of ZJIT's")));
        // YJIT's return addresses, aligned or not.
        let other = Some((false, "frames of another JIT compiler"));
        assert_eq!(said(None, [0x4000_0003, 0]), other);
        assert_eq!(said(None, [0x4000_0000, 0]), other);
    }
}

//! Puts Ruby frames back into the right activation.
//!
//! The walk goes from the leaf outwards and gives each activation of the
//! interpreter the next Ruby frames. When a thread is caught while it enters or
//! leaves an activation, there is one more on one side than on the other: a
//! frame has been pushed for which `rb_vm_exec` has not been called yet, or the
//! last frame of an activation has been popped and `rb_vm_exec` has not
//! returned. From there on every Ruby frame is one activation off. Seen from the
//! root, where both sides begin together, the places are right; so the surplus
//! is at the leaf, where the thread is.

use rbprof_common::wire::Frame;
use rbprof_common::wire::frame_attr;
use rbprof_common::wire::frame_kind;

/// Activations that a thread can be entering or leaving at once.
const MAX_SURPLUS: usize = 2;

/// Whether a frame is one of Ruby's stack.
const fn is_of_ruby(frame: &Frame) -> bool {
    !matches!(
        frame.kind(),
        frame_kind::NATIVE | frame_kind::KERNEL | frame_kind::COLLECTOR
    )
}

/// Orders the frames of a stack whose walk ended at its root with one side used
/// up before the other. `None` if there is more amiss than a thread on its way
/// into or out of an activation.
#[must_use]
pub fn reunite(frames: &[Frame]) -> Option<Vec<Frame>> {
    let (ruby, native): (Vec<Frame>, Vec<Frame>) = frames.iter().copied().partition(is_of_ruby);
    // C functions alone, with which a fiber or a thread may begin.
    let is_c = |frame: &&Frame| matches!(frame.kind(), frame_kind::CFUNC | frame_kind::IFUNC);
    let is_base = |frame: &&Frame| is_c(frame) && !frame.has(frame_attr::FINISH);
    let base = ruby.iter().rev().take_while(is_base).count();
    let (ruby, base) = ruby.split_at_checked(ruby.len().checked_sub(base)?)?;
    // Each activation's Ruby frames, leaf first.
    let activations: Vec<&[Frame]> = ruby
        .split_inclusive(|frame| frame.has(frame_attr::FINISH))
        .collect();
    let is_execution = |frame: &&Frame| frame.has(frame_attr::FINISH);
    let executions = native.iter().filter(is_execution).count();
    let finished = ruby.last().is_none_or(|last| last.has(frame_attr::FINISH));
    if !finished
        || activations.len() > executions + MAX_SURPLUS
        || executions > activations.len() + MAX_SURPLUS
    {
        return None;
    }
    let mut surplus = activations.len().saturating_sub(executions);
    let mut idle = executions.saturating_sub(activations.len());
    let mut activations = activations.into_iter();
    let mut united = Vec::with_capacity(frames.len());
    for frame in native {
        // The kernel's frames and the collector's stay on top.
        if surplus != 0 && frame.kind() == frame_kind::NATIVE {
            for activation in activations.by_ref().take(surplus) {
                united.extend_from_slice(activation);
            }
            surplus = 0;
        }
        if frame.has(frame_attr::FINISH) {
            match idle.checked_sub(1) {
                Some(rest) => idle = rest,
                None => united.extend_from_slice(activations.next().unwrap_or_default()),
            }
        }
        united.push(frame);
    }
    for activation in activations {
        united.extend_from_slice(activation);
    }
    united.extend_from_slice(base);
    Some(united)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn native(address: u64) -> Frame {
        Frame::native(5, address)
    }

    const fn execution(address: u64) -> Frame {
        Frame::activation(4, address)
    }

    const fn ruby(iseq: u64, finish: bool) -> Frame {
        let attr = if finish { frame_attr::FINISH } else { 0 };
        Frame::new(frame_kind::RUBY | attr, iseq, 1, 1)
    }

    #[test]
    fn a_frame_whose_activation_has_not_begun_goes_on_top() {
        let walked = [
            native(1),
            ruby(10, true),
            execution(2),
            native(3),
            ruby(11, false),
            ruby(12, true),
            execution(4),
            native(5),
            ruby(13, true),
        ];
        let united = [
            ruby(10, true),
            native(1),
            ruby(11, false),
            ruby(12, true),
            execution(2),
            native(3),
            ruby(13, true),
            execution(4),
            native(5),
        ];
        assert_eq!(reunite(&walked).as_deref(), Some(&united[..]));
    }

    #[test]
    fn an_activation_that_is_over_has_no_frames() {
        let kernel = Frame::new(frame_kind::KERNEL, 0, 7, 0);
        let walked = [
            kernel,
            ruby(11, false),
            ruby(12, true),
            execution(2),
            native(3),
            execution(4),
            native(5),
        ];
        let united = [
            kernel,
            execution(2),
            native(3),
            ruby(11, false),
            ruby(12, true),
            execution(4),
            native(5),
        ];
        assert_eq!(reunite(&walked).as_deref(), Some(&united[..]));
    }

    #[test]
    fn a_fiber_that_begins_with_c_functions_keeps_them_outermost() {
        let base = Frame::new(frame_kind::IFUNC, 0, 0, 0);
        let walked = [
            native(1),
            ruby(10, true),
            execution(2),
            native(3),
            ruby(11, true),
            base,
        ];
        let united = [
            ruby(10, true),
            native(1),
            ruby(11, true),
            execution(2),
            native(3),
            base,
        ];
        assert_eq!(reunite(&walked).as_deref(), Some(&united[..]));
    }

    #[test]
    fn what_is_further_apart_is_left_alone() {
        assert_eq!(reunite(&[ruby(1, false), execution(2), native(3)]), None);
        let many = [1, 2, 3].map(|iseq| ruby(iseq, true));
        assert_eq!(reunite(&[&[native(1)], &many[..]].concat()), None);
        assert_eq!(reunite(&[1, 2, 3].map(execution)), None);
    }

    #[test]
    fn what_fits_stays_as_it_is() {
        let whole = [
            native(1),
            ruby(11, true),
            execution(2),
            native(3),
            ruby(12, true),
            execution(4),
            native(5),
        ];
        assert_eq!(reunite(&whole).as_deref(), Some(&whole[..]));
    }
}

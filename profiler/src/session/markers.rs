//! Frames that say what could not be known, so that every sample has its place
//! in the profile.

use std::sync::Arc;

use rbprof_common::wire::sample_flags;

use super::process::Look;
use crate::profile::Function;
use crate::profile::FunctionKind;

/// The frame of a sample without Ruby frames, in a process that looked like
/// `look` if it is still being waited for.
#[must_use]
pub fn for_sample(flags: u32, comm: &[u8; 16], look: Look) -> Arc<Function> {
    let with_comm = |what| marker(&format!("({what}: {})", super::count::comm_text(comm)));
    if flags & sample_flags::PENDING != 0 {
        return match look {
            Look::Not => with_comm("starting"),
            Look::Ruby => marker("(Ruby starting)"),
            Look::NoRuby => with_comm("not Ruby"),
        };
    }
    if flags & sample_flags::NOT_RUBY != 0 {
        return with_comm("not Ruby");
    }
    if flags & sample_flags::INCOMPLETE != 0 {
        return marker("(unreadable Ruby stack)");
    }
    nothing_to_show()
}

/// The frame of a thread that runs no Ruby code.
#[must_use]
pub fn nothing_to_show() -> Arc<Function> {
    marker("(no Ruby code)")
}

/// The frame where the native stack was lost, and Ruby frames alone go on.
#[must_use]
pub fn native_cut() -> Arc<Function> {
    marker("(native frames missing)")
}

/// The frame at the outer end of a stack that was cut.
#[must_use]
pub fn for_cut_end(flags: u32) -> Option<Arc<Function>> {
    if flags & sample_flags::TRUNCATED != 0 {
        Some(marker("(truncated: stack too deep)"))
    } else if flags & sample_flags::FAULT != 0 {
        Some(marker("(truncated: memory not readable)"))
    } else {
        None
    }
}

/// The frame of a method that was replaced by another at the same place in
/// memory, at some time around the sample.
#[must_use]
pub fn replaced() -> Arc<Function> {
    marker("(method replaced meanwhile)")
}

fn marker(label: &str) -> Arc<Function> {
    let label: Arc<str> = label.into();
    Arc::new(Function {
        kind: FunctionKind::Marker,
        base_label: Arc::clone(&label),
        label,
        file: "".into(),
        first_line: 0,
    })
}

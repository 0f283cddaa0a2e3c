//! An iterator over tasks that only looks at who reads it: the agent, whose PID
//! namespace it puts into `NAMESPACE`. Minimum kernel version: 5.8.

use core::ffi::c_void;

use crate::maps::NAMESPACE;
use crate::programs::iterator::step;
use crate::task::Task;

#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task")]
fn own_namespace(ctx: *mut c_void) -> i32 {
    let (_, task) = step(ctx);
    // Once is enough: at the end.
    if task.is_null()
        && let Some(namespace) = Task::current().namespace()
        && let Some(own) = NAMESPACE.get_ptr_mut(0)
    {
        // SAFETY: nothing else uses the map before the agent goes on.
        unsafe { *own = namespace };
    }
    0
}

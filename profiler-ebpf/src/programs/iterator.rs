//! What the kernel calls an iterator over tasks with.

use core::ffi::c_void;

/// `struct bpf_iter_meta` of the kernel, as far as it is used.
#[repr(C)]
struct IterMeta {
    seq: *mut c_void,
}

/// `struct bpf_iter__task` of the kernel.
#[repr(C)]
struct IterTask {
    meta: *const IterMeta,
    task: *const c_void,
}

/// The file that is being read, and the next task; null at the end.
#[inline(always)]
pub(super) fn step(ctx: *mut c_void) -> (*mut c_void, *const c_void) {
    let ctx = ctx.cast_const().cast::<IterTask>();
    // SAFETY: the kernel calls an iterator over tasks with this context; the
    // verifier knows the types behind both pointers.
    unsafe { ((*(*ctx).meta).seq, (*ctx).task) }
}

//! From a native thread to its execution context.
//!
//! The root of a stack is the *sampled thread's own* execution context. The
//! context of some other thread would charge its stack to this one.

use crate::Fault;
use crate::Memory;
use crate::layout::WalkLayout;
use crate::layout::fixed;
use crate::process::ProcessEntry;
use crate::process::root;

/// Why a thread has no usable execution context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoContext {
    /// The thread runs no Ruby: it has no context yet or any more, or one without
    /// a VM stack, or its Ruby thread does not own the GVL where only the owner's
    /// context can be known (2.7).
    None,
    /// Memory on the way to the context could not be read.
    Fault,
    /// There is a context, but it is not a valid one.
    Invalid,
}

impl From<Fault> for NoContext {
    fn from(_: Fault) -> Self {
        Self::Fault
    }
}

/// A validated execution context: where its control frames are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// Address of the execution context.
    pub ec: u64,
    /// Lowest address of the VM stack.
    pub stack: u64,
    /// First address past the VM stack.
    pub stack_end: u64,
    /// The newest control frame.
    pub cfp: u64,
}

/// Largest VM stack taken for real: Ruby's default is 1 MiB, and
/// `RUBY_THREAD_VM_STACK_SIZE` may raise it.
const MAX_VM_STACK_WORDS: u64 = 1 << 27;

/// The execution context of the thread whose thread pointer is
/// `thread_pointer`.
///
/// # Errors
/// [`NoContext`] says why there is none.
#[inline(always)]
pub fn context_of<M: Memory>(
    entry: &ProcessEntry,
    thread_pointer: u64,
    memory: &M,
) -> Result<Context, NoContext> {
    let variable = match entry.root {
        root::TLS_STATIC => thread_pointer.wrapping_add_signed(entry.ec),
        root::TLS_DTV => {
            let block = dtv_block(entry, thread_pointer, memory)?;
            block.wrapping_add_signed(entry.ec)
        }
        root::GLOBAL => entry.ec.cast_unsigned(),
        _ => return Err(NoContext::None),
    };
    let ec = match memory.word(variable) {
        Ok(0) => return Err(NoContext::None),
        Ok(ec) => ec,
        // A new thread has not touched its own block yet, which is mapped at the
        // first touch, and one that ends has no memory any more.
        Err(Fault) if entry.root == root::TLS_STATIC => return Err(NoContext::None),
        Err(Fault) => return Err(NoContext::Fault),
    };
    let context = read_context(ec, &entry.layout, memory)?;
    if entry.root == root::GLOBAL || entry.vm != 0 {
        let thread = memory.word(ec + u64::from(entry.layout.ec_thread))?;
        if entry.root == root::GLOBAL {
            let owner = memory.word(thread.wrapping_add(u64::from(entry.layout.thread_id)))?;
            if owner.wrapping_add(entry.pthread_bias) != thread_pointer {
                return Err(NoContext::None);
            }
        }
        if entry.vm != 0
            && memory.word(thread.wrapping_add(u64::from(entry.layout.thread_vm)))? != entry.vm
        {
            return Err(NoContext::Invalid);
        }
    }
    Ok(context)
}

/// Start of libruby's TLS block in the thread, through the dynamic thread
/// vector.
#[inline(always)]
fn dtv_block<M: Memory>(
    entry: &ProcessEntry,
    thread_pointer: u64,
    memory: &M,
) -> Result<u64, NoContext> {
    let vector =
        memory.word(thread_pointer.wrapping_add_signed(i64::from(entry.dtv.pointer_offset)))?;
    let slot = vector.wrapping_add(entry.module.wrapping_mul(u64::from(entry.dtv.entry_size)));
    let block = memory.word(slot)?;
    // glibc marks a block that this thread has not touched yet with -1.
    if block == 0 || block == u64::MAX {
        return Err(NoContext::None);
    }
    Ok(block)
}

/// Reads and validates the execution context at `ec`.
///
/// # Errors
/// [`NoContext::None`] when it has no VM stack, [`NoContext::Fault`] when it
/// cannot be read, [`NoContext::Invalid`] when its newest control frame is not
/// inside its VM stack.
#[inline(always)]
pub fn read_context<M: Memory>(
    ec: u64,
    layout: &WalkLayout,
    memory: &M,
) -> Result<Context, NoContext> {
    // The three words the walk needs lie side by side.
    const _: () =
        assert!(fixed::EC_VM_STACK == 0 && fixed::EC_VM_STACK_SIZE == 8 && fixed::EC_CFP == 16);
    let [stack, words, cfp] = memory.words3(ec)?;
    // A thread has its context before it has a VM stack, and after.
    if stack == 0 && words == 0 {
        return Err(NoContext::None);
    }
    if stack & 7 != 0 || cfp & 7 != 0 || words == 0 || words > MAX_VM_STACK_WORDS {
        return Err(NoContext::Invalid);
    }
    let stack_end = stack.wrapping_add(words * 8);
    let room = stack_end.wrapping_sub(cfp);
    if stack_end < stack || cfp < stack || cfp >= stack_end || room < u64::from(layout.cfp_size) {
        return Err(NoContext::Invalid);
    }
    Ok(Context {
        ec,
        stack,
        stack_end,
        cfp,
    })
}

//! What the garbage collector of a process is doing, and which thread does it.
//!
//! Ruby says with one flag for the whole process that it is collecting. The
//! thread that does it has the lock of its Ractor (the GVL), and where there
//! are several Ractors, that Ractor has the lock of the VM. Other threads may
//! run meanwhile: without the GVL, or, while memory is swept bit by bit, in
//! other Ractors.

use bytemuck::Pod;
use bytemuck::Zeroable;

use crate::Fault;
use crate::Memory;
use crate::layout::WalkLayout;
use crate::layout::collector_flags;
use crate::roots::Context;
use crate::wire::Frame;
use crate::wire::frame_kind;
use crate::wire::gc_phase;

/// What tells whether a thread is the one that collects.
pub mod collects {
    /// Nothing that is known: no thread is taken for it.
    pub const UNKNOWN: u32 = 0;
    /// That its context was found: before Ruby 3.0, only the thread that has
    /// the GVL has one ([`root::GLOBAL`](crate::process::root::GLOBAL)).
    pub const CONTEXT: u32 = 1;
    /// That it is the running thread of its Ractor, and that Ractor the only
    /// one, or the owner of the VM's lock.
    pub const RACTOR: u32 = 2;
}

/// Where the garbage collector keeps what it is doing, and Ruby what tells who
/// does it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Collector {
    /// Address of the number of collections begun; `0`: not known.
    pub count: u64,
    /// Address of its flags; `0`: not known.
    pub flags: u64,
    /// Address of `rb_vm_t.ractor.cnt` (32 bits). This and what follows counts
    /// with [`collects::RACTOR`] only.
    pub ractors: u64,
    /// Address of `rb_vm_t.ractor.sync.lock_owner`.
    pub lock_owner: u64,
    /// `rb_thread_t.ractor`.
    pub thread_ractor: u32,
    /// `rb_ractor_t.threads.running_ec`.
    pub running_ec: u32,
    /// One of [`collects`].
    pub collects: u32,
    /// Keeps the size a multiple of eight.
    pub reserved: u32,
}

/// What a garbage collector was doing at some moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// See [`Collector::epoch`].
    pub epoch: u64,
    /// Its flags; `0` where they are not known.
    flags: u64,
}

impl Activity {
    /// The [`gc_phase`], if a thread is collecting at this moment. Between two
    /// slices of incremental marking or lazy sweeping, none is.
    #[inline(always)]
    #[must_use]
    pub const fn phase(&self) -> Option<u64> {
        const _: () = assert!(collector_flags::MARKING == gc_phase::MARKING);
        if self.flags & collector_flags::DURING_GC == 0 {
            return None;
        }
        Some(self.flags & collector_flags::MODE)
    }
}

impl Collector {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self {
        count: 0,
        flags: 0,
        ractors: 0,
        lock_owner: 0,
        thread_ractor: 0,
        running_ec: 0,
        collects: collects::UNKNOWN,
        reserved: 0,
    };

    /// A number that stays the same for as long as nothing that was in use can
    /// have been freed; `0` where that is not known.
    ///
    /// What a thread uses while no marking is under way has survived the last
    /// one, or is younger, and is not swept before the next has begun, which
    /// counts. What it uses during marking may be dropped before the marking
    /// gets to it, so marking has numbers of its own.
    #[inline(always)]
    #[must_use]
    pub fn epoch<M: Memory>(&self, memory: &M) -> u64 {
        self.activity(memory).epoch
    }

    /// What it is doing.
    #[inline(always)]
    #[must_use]
    pub fn activity<M: Memory>(&self, memory: &M) -> Activity {
        if self.flags == 0 {
            return Activity::default();
        }
        if self.count == 0 {
            return Activity {
                epoch: 0,
                flags: memory.word(self.flags).unwrap_or(0),
            };
        }
        match (memory.word(self.count), memory.word(self.flags)) {
            (Ok(count), Ok(flags)) if count <= MAX_COLLECTIONS => {
                let marking = flags & collector_flags::MODE == collector_flags::MARKING;
                Activity {
                    epoch: count << 1 | marking as u64 | KNOWN_EPOCH,
                    flags,
                }
            }
            _ => Activity::default(),
        }
    }

    /// The frame on top of a thread's stack, if it is the one that collects.
    /// What cannot be read makes none. Memory is only read while some thread
    /// collects.
    #[inline(always)]
    #[must_use]
    pub fn frame<M: Memory>(
        &self,
        activity: Activity,
        context: &Context,
        layout: &WalkLayout,
        memory: &M,
    ) -> Option<Frame> {
        let phase = activity.phase()?;
        if self.is_collecting(context, layout, memory) != Ok(true) {
            return None;
        }
        Some(Frame::new(frame_kind::COLLECTOR, phase, 0, 0))
    }

    /// Whether the thread with that context is the one that collects, given
    /// that one does.
    #[inline(always)]
    fn is_collecting<M: Memory>(
        &self,
        context: &Context,
        layout: &WalkLayout,
        memory: &M,
    ) -> Result<bool, Fault> {
        match self.collects {
            collects::CONTEXT => return Ok(true),
            collects::RACTOR => {}
            _ => return Ok(false),
        }
        // A thread that goes on without the GVL is its Ractor's running one
        // until another gets it, but then nobody in the Ractor can collect.
        let thread = memory.word(context.ec.wrapping_add(u64::from(layout.ec_thread)))?;
        let ractor = memory.word(thread.wrapping_add(u64::from(self.thread_ractor)))?;
        let running = memory.word(ractor.wrapping_add(u64::from(self.running_ec)))?;
        if running != context.ec {
            return Ok(false);
        }
        // The lock is not taken before there is a second Ractor.
        let owner = memory.word(self.lock_owner)?;
        if owner != 0 {
            return Ok(owner == ractor);
        }
        Ok(memory.word(self.ractors)? as u32 == 1)
    }
}

/// More collections than any process makes: a larger number is none.
const MAX_COLLECTIONS: u64 = 1 << 40;
/// Tells an epoch from "not known".
const KNOWN_EPOCH: u64 = 1 << 63;

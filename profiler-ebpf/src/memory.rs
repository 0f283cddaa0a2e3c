//! Target memory, read with the BPF helpers. They never fault pages in: what
//! is not resident cannot be read.

use aya_ebpf::helpers::bpf_probe_read_user;
use aya_ebpf::helpers::generated::bpf_probe_read_user as probe_read_user;
use rbprof_common::Fault;
use rbprof_common::Memory;
use rbprof_common::memory::WINDOW_WORDS;
use rbprof_common::memory::Window;

/// Memory of the current task.
pub(crate) struct UserMemory;

impl Memory for UserMemory {
    #[inline(always)]
    fn word(&self, addr: u64) -> Result<u64, Fault> {
        // SAFETY: the helper checks the address itself.
        unsafe { bpf_probe_read_user(addr as *const u64) }.map_err(|_| Fault)
    }

    #[inline(always)]
    fn words3(&self, addr: u64) -> Result<[u64; 3], Fault> {
        // SAFETY: the helper checks the address itself.
        unsafe { bpf_probe_read_user(addr as *const [u64; 3]) }.map_err(|_| Fault)
    }

    #[inline(always)]
    fn window(&self, addr: u64, dst: &mut Window, words: usize) -> Result<(), Fault> {
        if words > WINDOW_WORDS {
            return Err(Fault);
        }
        // SAFETY: `dst` holds at least `words` words, as just checked, and the
        // helper checks the source address itself.
        let status = unsafe {
            probe_read_user(
                dst.as_mut_ptr().cast(),
                (words * 8) as u32,
                addr as *const _,
            )
        };
        if status == 0 { Ok(()) } else { Err(Fault) }
    }
}

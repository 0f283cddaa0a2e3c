use rbprof::kernel::*;
use rbprof_common::wire::*;
fn main() {
    let tail = std::env::args().nth(2).is_some();
    let mut k = Kernel::load(&Options { looping: if tail { Looping::TailCalls } else { Looping::Probe }, ..Default::default() }).unwrap_or_else(|e| panic!("{e}"));
    for p in k.programs() { println!("{p:?}"); }
    let pid: u32 = std::env::args().nth(1).unwrap().parse().unwrap();
    let tp = k.thread_pointers(pid).unwrap();
    println!("{tp:x?}");
    k.set_process(pid, &Default::default()).unwrap();
    k.start().unwrap();
    std::thread::sleep(std::time::Duration::from_secs(1));
    let mut n = 0;
    k.drain(|r| { n += 1; if n < 3 { let s: Sample = bytemuck::pod_read_unaligned(r); println!("{s:?}"); } });
    println!("{n} records {:?}", k.counters());
}

use super::*;
use crate::targets::elf::file_cache;

/// What the code of a file says, and what its symbols say.
fn both(path: &str) -> (Analysis, Option<u64>, Option<u64>) {
    let file = file_cache(std::fs::File::open(path).unwrap());
    let elf = Elf::parse(&file).unwrap();
    let symbol = |name| elf.dynamic_symbol(name).unwrap().map(|symbol| symbol.value);
    (
        analyse(&elf, None).unwrap(),
        symbol(b"rb_vm_exec"),
        symbol(b"ruby_current_ec"),
    )
}

#[test]
fn scratch() {
    for name in std::env::var("RB_FILES")
        .unwrap_or_default()
        .split_whitespace()
    {
        let start = std::time::Instant::now();
        let (analysis, vm_exec, ec) = both(name);
        println!("{name} {:?}: {analysis:x?}", start.elapsed());
        println!("  symbol {vm_exec:x?} tls {ec:x?}");
    }
}

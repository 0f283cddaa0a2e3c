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
#[test]
fn scratch_cold() {
    for name in std::env::var("RB_FILES")
        .unwrap_or_default()
        .split_whitespace()
    {
        let bytes = std::fs::read(name).unwrap();
        use object::{Object, ObjectSymbol};
        let file = object::File::parse(&*bytes).unwrap();
        let mut by_name = std::collections::HashMap::new();
        for s in file.symbols() {
            if s.kind() == object::SymbolKind::Text {
                by_name
                    .entry(s.name().unwrap_or("").to_owned())
                    .or_insert_with(Vec::new)
                    .push((s.address(), s.size()));
            }
        }
        let mut pairs = vec![];
        for (n, cold) in &by_name {
            let Some(base) = n.strip_suffix(".cold") else {
                continue;
            };
            let Some(hot) = by_name.get(base) else {
                continue;
            };
            if cold.len() == 1 && hot.len() == 1 && cold[0].1 > 0 {
                pairs.push((base.to_owned(), hot[0].0, cold[0]));
            }
        }
        let elf = Elf::parse(&*bytes).unwrap();
        let addresses: Vec<u64> = pairs.iter().map(|p| p.1).collect();
        let found = cold_parts(&elf, &addresses).unwrap();
        let (mut right, mut none, mut wrong) = (0, 0, 0);
        for ((n, hot, (a, s)), f) in pairs.iter().zip(found) {
            match f {
                None => {
                    none += 1;
                    if none < 6 {
                        println!("none: {n} {hot:x} cold {a:x}+{s:x}");
                    }
                }
                Some(r) if r.start == *a && r.end == a + s => right += 1,
                Some(r) => {
                    wrong += 1;
                    if wrong < 10 {
                        println!("wrong: {n} {hot:x} cold {a:x}+{s:x} found {r:x?}");
                    }
                }
            }
        }
        // And functions without a cold part.
        let others: Vec<(String, u64)> = by_name
            .iter()
            .filter(|(n, v)| {
                v.len() == 1
                    && v[0].1 > 0
                    && !n.contains(".cold")
                    && !by_name.contains_key(&format!("{n}.cold"))
            })
            .map(|(n, v)| (n.clone(), v[0].0))
            .collect();
        let addresses: Vec<u64> = others.iter().map(|p| p.1).collect();
        let found = cold_parts(&elf, &addresses).unwrap();
        let mut invented = 0;
        for ((n, a), f) in others.iter().zip(found) {
            if let Some(f) = f {
                invented += 1;
                if invented < 10 {
                    println!("invented: {n} {a:x} -> {f:x?}");
                }
            }
        }
        println!(
            "{name}: right {right} none {none} wrong {wrong}; invented {invented} of {}",
            others.len()
        );
    }
}

//! Any bytes as `.eh_frame`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rbprof::targets::code::functions::Functions;

fuzz_target!(|data: &[u8]| {
    let Some((address, data)) = data.split_first_chunk() else {
        return;
    };
    let Ok(functions) = Functions::parse(u64::from_le_bytes(*address), data) else {
        return;
    };
    let mut last = None;
    for function in functions.iter() {
        assert!(function.start < function.end);
        assert!(last < Some(function.start), "in order, each once");
        assert_eq!(functions.starting_at(function.start), Some(function));
        assert_eq!(functions.containing(function.start), Some(function));
        let _ = functions.containing(function.end);
        assert_eq!(functions.before(function.start).map(|it| it.start), last);
        last = Some(function.start);
    }
    assert_eq!(functions.iter().count(), functions.len());
});

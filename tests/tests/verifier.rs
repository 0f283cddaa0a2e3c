//! The kernel's verifier takes every program, within a budget of instructions.

use anyhow::Result;
use rbprof::kernel::Looping;
use rbprof::kernel::Options;
use rbprof::kernel::UserRegisters;
use rbprof::kernel::load_with_announcer;
use rbprof_tests::recording::Recorder;

/// The verifier gives up after a million instructions, and what it takes for a
/// program differs from kernel to kernel: there must be room.
const BUDGETS: [(&str, u32); 10] = [
    ("sample", 20_000),
    ("sample_here", 20_000),
    ("sample_chained", 20_000),
    ("sample_chain_link", 30_000),
    ("on_fork", 1_000),
    ("on_exec", 1_500),
    ("on_exit", 1_000),
    ("on_mapping", 4_000),
    ("thread_pointers", 1_000),
    ("own_namespace", 1_000),
];

#[test]
fn verifier_takes_every_program_within_its_budget() -> Result<()> {
    let mut seen = Vec::new();
    for (looping, registers, translate_ids) in [
        (Looping::Probe, UserRegisters::Probe, false),
        (Looping::TailCalls, UserRegisters::FromStack, false),
        (Looping::Probe, UserRegisters::FromStack, true),
        (Looping::TailCalls, UserRegisters::Probe, true),
    ] {
        println!("{looping:?}, {registers:?}, ids translated: {translate_ids}");
        let options = Options {
            looping,
            registers,
            translate_ids,
            ..Options::default()
        };
        let Some(mut recorder) = Recorder::new(&options)? else {
            return Ok(());
        };
        if looping == Looping::Probe {
            recorder.session().kernel().load_probe()?;
        }
        let programs = recorder.session().kernel().programs();
        for program in programs.into_iter().chain(load_with_announcer(&options)?) {
            // Kernels before 5.16 do not tell.
            let Some(verified) = program.verified_instructions else {
                continue;
            };
            println!("{:18} {verified:7} instructions verified", program.name);
            let budget = BUDGETS.iter().find(|(name, _)| *name == program.name);
            let &(_, budget) = budget.expect("every program has a budget");
            assert!(
                verified <= budget,
                "{}: {verified} > {budget}",
                program.name
            );
            seen.push(program.name);
        }
    }
    for (name, _) in BUDGETS {
        assert!(
            seen.iter().any(|seen| seen == name),
            "{name} was not loaded"
        );
    }
    Ok(())
}

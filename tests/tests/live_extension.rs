//! A C extension that burns CPU time in chains of functions, and that calls and
//! is called by Ruby code in all ways that there are: the command shows exactly
//! those chains, with the shares that the program itself has measured.

use std::collections::HashMap;
use std::path::Path;

use anyhow::Result;
use anyhow::ensure;
use rbprof::presentation::NativeFrames;
use rbprof_tests::chains;
use rbprof_tests::chains::Link;
use rbprof_tests::chains::View;
use rbprof_tests::checks;
use rbprof_tests::checks::extension::ENOUGH;
use rbprof_tests::checks::extension::ON_THE_WAY;
use rbprof_tests::checks::extension::Pace;
use rbprof_tests::checks::extension::UNDER;
use rbprof_tests::checks::extension::WITH_SYMBOLS;
use rbprof_tests::checks::extension::by_part;
use rbprof_tests::checks::extension::is_the_extension;
use rbprof_tests::checks::extension::parts;
use rbprof_tests::checks::roots;
use rbprof_tests::checks::roots::every_stack_has_its_own;
use rbprof_tests::frames::Jit;
use rbprof_tests::rig;
use rbprof_tests::task::Bench;
use rbprof_tests::task::IN_DOUBT;
use rbprof_tests::task::MUSL;
use rbprof_tests::task::SHAPE_MS;
use rbprof_tests::task::Task;

const RBPROF: &str = env!("CARGO_BIN_EXE_rbprof-under-test");
/// Where each sample takes milliseconds.
const LOW_FREQUENCY: u64 = 97;
/// Largest share of samples without names: under a busy collector, one that is
/// needed for the first time may be withheld.
const NAMELESS: f64 = 0.02;
/// Levels at which C code calls a block that calls C code.
const LEVELS: usize = 1_000;
/// Largest share of samples that are on their way there.
const GETTING_THERE: f64 = 0.03;

/// What it takes to run and record a program on that Ruby.
fn bench(name: &str) -> Result<Option<Bench<'static>>> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(None);
    };
    let extension = rig::extension(&ruby)?;
    Ok(extension.map(|extension| Bench {
        rbprof: Path::new(RBPROF),
        ruby,
        extension,
    }))
}

fn shares_are_right(name: &str, jit: Jit) -> Result<()> {
    let Some(bench) = bench(name)? else {
        return Ok(());
    };
    checks::extension::shares_are_right(&bench, jit, Pace::HOST)?;
    Ok(())
}

#[test]
fn shares_on_debian_2_7_4() -> Result<()> {
    shares_are_right("debian-2.7.4", Jit::Off)
}

#[test]
fn shares_on_debian_3_1_2() -> Result<()> {
    shares_are_right("debian-3.1.2", Jit::Off)
}

#[test]
fn shares_on_3_3_8_stripped() -> Result<()> {
    shares_are_right("source-3.3.8-stripped", Jit::Off)
}

#[test]
fn shares_on_3_4_5_static() -> Result<()> {
    shares_are_right(WITH_SYMBOLS, Jit::Off)
}

#[test]
fn shares_on_debian_3_4_11() -> Result<()> {
    shares_are_right("debian-3.4.11", Jit::Off)
}

#[test]
fn shares_on_musl() -> Result<()> {
    shares_are_right(MUSL, Jit::Off)
}

#[test]
fn shares_with_yjit() -> Result<()> {
    shares_are_right("source-3.3.8", Jit::Yjit)
}

#[test]
fn without_symbols_there_is_a_name_for_the_file() -> Result<()> {
    let Some(bench) = bench("debian-3.1.2")? else {
        return Ok(());
    };
    let task = Task {
        stripped: true,
        native: &[NativeFrames::Extensions],
        ..Task::new(&bench, "shares.rb")
    };
    let run = task.run()?;
    for (view, profile) in &run.profiles {
        let found = by_part(profile, *view, &parts());
        found.is_complete(&parts(), ON_THE_WAY)?;
        let mut names: Vec<&str> = profile
            .samples
            .iter()
            .flat_map(|sample| &sample.frames)
            .filter(|frame| is_the_extension(profile.object(frame).unwrap_or_default()))
            .map(|frame| &*frame.function.label)
            .collect();
        names.sort_unstable();
        names.dedup();
        ensure!(names == ["[burn.so]"], "{names:?}");
    }
    Ok(())
}

#[test]
fn an_extension_is_loaded_meanwhile() -> Result<()> {
    // What is mapped is looked at soon after that, and not at once.
    const LATE_MS: f64 = 100.0;
    for name in ["debian-3.1.2", "source-3.4.5-static"] {
        let Some(bench) = bench(name)? else {
            return Ok(());
        };
        let task = Task {
            environment: &[("LATE", "1")],
            native: &[NativeFrames::Extensions],
            ..Task::new(&bench, "shares.rb")
        };
        let run = task.run()?;
        for (view, profile) in &run.profiles {
            by_part(profile, *view, &parts())
                .is_complete(&parts(), ON_THE_WAY + LATE_MS / SHAPE_MS as f64)?;
        }
    }
    Ok(())
}

#[test]
fn a_thousand_levels_are_all_there() -> Result<()> {
    for name in ["debian-2.7.4", "source-3.3.8-stripped", "debian-3.4.11"] {
        let Some(bench) = bench(name)? else {
            return Ok(());
        };
        let levels = LEVELS.to_string();
        let task = Task {
            environment: &[("LEVELS", &levels)],
            frequency: LOW_FREQUENCY,
            ..Task::new(&bench, "nest.rb")
        };
        let run = task.run()?;
        run.is_beyond_doubt()?;
        let level = "Burn.nest;~;:burn_nest;:nest_level;~;block in <main>;";
        let chain = format!("{UNDER}{}Object#bottom", level.repeat(LEVELS));
        for (view, profile) in &run.profiles {
            let (mut all, mut whole) = (0, 0);
            for sample in &profile.samples {
                all += sample.count;
                // At the bottom the program also looks at its clock.
                if chains::rest(&Link::all(sample, profile), &chain, *view).is_some() {
                    whole += sample.count;
                }
            }
            eprintln!("{name}, {:?}: {whole} of {all} whole", view.native);
            ensure!(all >= ENOUGH, "{name}: {all} samples");
            ensure!(
                (all - whole) as f64 <= GETTING_THERE * all as f64,
                "{name}: {whole} of {all} samples have all {LEVELS} levels"
            );
        }
    }
    Ok(())
}

#[test]
fn every_kind_of_stack_has_its_own_root() -> Result<()> {
    for name in [
        "debian-2.7.4",
        "debian-3.1.2",
        "source-3.3.8-stripped",
        "debian-3.4.11",
    ] {
        let Some(bench) = bench(name)? else {
            return Ok(());
        };
        every_stack_has_its_own(&bench, roots::Pace::HOST)?;
    }
    Ok(())
}

#[test]
fn activations_that_are_left_by_jumps_are_gone() -> Result<()> {
    for name in ["debian-2.7.4", "source-3.3.8-stripped", "debian-3.4.11"] {
        let Some(bench) = bench(name)? else {
            return Ok(());
        };
        let run = Task::new(&bench, "jumps.rb").run()?;
        run.is_beyond_doubt()?;
        for (view, profile) in &run.profiles {
            let (mut all, mut nameless, mut wrong) = (0, 0, 0);
            for sample in &profile.samples {
                let stack = Link::all(sample, profile);
                all += sample.count;
                if stack.contains(&Link::Marker("<unreadable>".to_owned())) {
                    nameless += sample.count;
                } else if !levels_are_in_order(&stack, *view) {
                    wrong += sample.count;
                    eprintln!("{name}: {} times {stack:?}", sample.count);
                }
            }
            eprintln!("{name}: {all} samples, {nameless} nameless, {wrong} not in order");
            ensure!(all >= ENOUGH, "{name}: {all} samples");
            ensure!(
                wrong as f64 <= IN_DOUBT * all as f64 && nameless as f64 <= NAMELESS * all as f64,
                "{name}: of {all} samples, {nameless} are nameless, {wrong} not in order"
            );
        }
    }
    Ok(())
}

/// Whether a stack of `jumps.rb` begins where it should, and each method of the
/// extension in it has its own function above it.
fn levels_are_in_order(stack: &[Link], view: View) -> bool {
    let Some(mut rest) = chains::rest(stack, "^;<main>", view) else {
        return false;
    };
    let functions = HashMap::from([
        ("Burn.nest", "Burn.nest;~;:burn_nest;:nest_level;~"),
        ("Burn.protect", "Burn.protect;~;:burn_protect"),
        ("Burn.with_block", "Burn.with_block;~;:burn_with_block"),
    ]);
    while let Some((first, above)) = rest.split_first() {
        let chain = match first {
            Link::Method(label) => functions.get(label.as_str()),
            _ => None,
        };
        let goes_on = |above: &[Link]| {
            let mut above = above.iter();
            above.any(|link| matches!(link, Link::Method(label) if label.starts_with("block ")))
        };
        rest = match chain {
            // Nothing is said of one that is just called, or left.
            Some(chain) if goes_on(above) => match chains::rest(rest, chain, view) {
                Some(above) => above,
                None => return false,
            },
            _ => above,
        };
    }
    true
}

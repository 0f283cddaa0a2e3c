//! A C extension that burns CPU time in chains of functions, and that calls and
//! is called by Ruby code in all ways that there are: the command shows exactly
//! those chains, with the shares that the program itself has measured.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::path::Path;

use anyhow::Result;
use anyhow::ensure;
use rbprof::presentation::NativeFrames;
use rbprof::profile::FunctionKind;

use crate::chains;
use crate::chains::Link;
use crate::chains::View;
use crate::frames::Jit;
use crate::pprof::Read;
use crate::task::Bench;
use crate::task::IN_DOUBT;
use crate::task::MUSL;
use crate::task::SLICE_MS;
use crate::task::Task;

/// Standard deviations of a share, as chance has it, that its largest error must be
/// more than.
const SIGMAS: f64 = 5.0;
/// Largest share of samples that are on their way from one chain to another.
pub const ON_THE_WAY: f64 = 0.015;
/// Of those in musl's own functions too: it has no unwind tables, so that the
/// native stack ends there.
const ON_THE_WAY_ON_MUSL: f64 = 0.05;
/// A Ruby with symbols.
pub const WITH_SYMBOLS: &str = "source-3.4.5-static";
/// Samples that are enough to speak of shapes.
pub const ENOUGH: u64 = 100;

/// How fast it goes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Ticks per second.
    pub frequency: u64,
    /// CPU time in which shares are measured, milliseconds.
    pub cpu_ms: u64,
    /// CPU time of a part at once, milliseconds: so much that what is done between
    /// two parts hardly counts.
    pub slice_ms: u64,
    /// CPU time of a block that C code calls again and again, milliseconds.
    pub block_ms: u64,
    /// Largest error of a share; the CPU time must be enough for that.
    pub points: f64,
    /// Largest share of samples that are on their way from one chain to another.
    pub on_the_way: f64,
    /// Largest share of stacks that are cut or in doubt.
    pub in_doubt: f64,
    /// What is recorded, each by a command of its own.
    pub native: &'static [NativeFrames],
}

impl Pace {
    /// Of real machines. The frequency is a prime, so that nothing in the program
    /// keeps in step with it.
    pub const HOST: Self = Self {
        frequency: 997,
        cpu_ms: 9_500,
        slice_ms: SLICE_MS,
        block_ms: 1,
        points: 0.02,
        on_the_way: ON_THE_WAY,
        in_doubt: IN_DOUBT,
        native: &[
            NativeFrames::Extensions,
            NativeFrames::All,
            NativeFrames::None,
        ],
    };
    /// Of emulated machines, where code that runs for the first time or seldom is
    /// translated first: what is between two parts takes many times as long as on a
    /// real machine, in comparison with the parts.
    pub const EMULATED: Self = Self {
        frequency: 149,
        cpu_ms: 5_000,
        slice_ms: 200,
        block_ms: 10,
        points: 0.10,
        on_the_way: 0.08,
        in_doubt: 0.02,
        native: &[NativeFrames::Extensions, NativeFrames::All],
    };
}

/// What `shares.rb` does, and the stack that it has meanwhile, as
/// [`chains`] writes it.
const PARTS: &[(&str, &str)] = &[
    (
        "cpu",
        "Parts.cpu;Burn.cpu;~;:burn_cpu;:burn_outer;:burn_middle;:burn_leaf",
    ),
    (
        WITHOUT_GVL,
        "Parts.without_gvl;Burn.without_gvl;~;:burn_without_gvl;~;:without_gvl;\
         :burn_outer;:burn_middle;:burn_leaf",
    ),
    (
        "with_block",
        "Parts.with_block;Burn.with_block;~;:burn_with_block;:block_outer;:block_middle;\
         :block_leaf",
    ),
    (
        "in_block",
        "Parts.with_block;Burn.with_block;~;:burn_with_block;:block_outer;:block_middle;\
         :block_leaf;~;block in Parts.with_block;Parts.in_block;Parts.spin",
    ),
    (
        "funcall",
        "Parts.funcall;Burn.funcall;~;:burn_funcall;~;Parts.called;Burn.cpu;~;:burn_cpu;\
         :burn_outer;:burn_middle;:burn_leaf",
    ),
    (
        "protect",
        "Parts.protect;Burn.protect;~;:burn_protect;:handler;:burn_outer;:burn_middle;:burn_leaf",
    ),
    (
        "rescue",
        "Parts.rescue;Burn.rescue;~;:burn_rescue;~;:rescued;:handler;:burn_outer;:burn_middle;\
         :burn_leaf",
    ),
    ("ruby", "Parts.ruby;Parts.spin"),
];
const WITHOUT_GVL: &str = "without_gvl";
/// What all of these are under.
pub const UNDER: &str = "^;<main>;Spend.on;block in <main>;";
/// The part in a thread without Ruby.
const C_THREAD: (&str, &str) = (
    "c_thread",
    "$;:thread_main;:burn_outer;:burn_middle;:burn_leaf",
);

/// The chains of `shares.rb` are there with their shares, and hardly anything else:
/// how many samples the smallest recording has.
///
/// # Errors
/// If they are not.
pub fn shares_are_right(bench: &Bench<'_>, jit: Jit, pace: Pace) -> Result<u64> {
    let block_ms = pace.block_ms.to_string();
    let task = Task {
        jit,
        environment: &[("BLOCK_MS", &block_ms)],
        cpu_ms: pace.cpu_ms,
        slice_ms: pace.slice_ms,
        frequency: pace.frequency,
        native: pace.native,
        ..Task::new(bench, "shares.rb")
    };
    let name = bench.ruby.name;
    let run = task.run()?;
    run.has_few_doubts(pace.in_doubt)?;
    let mut fewest = u64::MAX;
    let parts = parts();
    let on_the_way = if name == MUSL {
        ON_THE_WAY_ON_MUSL
    } else {
        pace.on_the_way
    };
    for (view, profile) in &run.profiles {
        let found = by_part(profile, *view, &parts);
        eprintln!("{name}, {:?}:", view.native);
        found.has_shares(&run.spent, pace.points)?;
        fewest = fewest.min(found.all);
        found.is_complete(&parts, on_the_way)?;
        methods_are_in_their_file(profile, *view)?;
        if name == WITH_SYMBOLS && view.native == NativeFrames::All {
            interpreter_is_as_in_its_source(profile)?;
        }
    }
    Ok(fewest)
}

/// A method in C is called by the function that makes its frame, and Ruby code is
/// run by the main loop. What is inlined there has no frame.
fn interpreter_is_as_in_its_source(profile: &Read) -> Result<()> {
    let (mut right, mut wrong) = (0, BTreeMap::<_, u64>::new());
    for sample in &profile.samples {
        let frames: Vec<_> = sample.frames.iter().rev().collect();
        let mut first_in_ruby = true;
        for pair in frames.windows(2) {
            let [outer, inner] = pair else { continue };
            let (outer_label, label) = (&*outer.function.label, &*inner.function.label);
            let caller = if inner.function.kind == FunctionKind::Native && label == "burn_cpu" {
                "vm_call_cfunc_with_frame"
            } else if inner.function.kind == FunctionKind::Ruby
                && std::mem::take(&mut first_in_ruby)
            {
                "rb_vm_exec"
            } else {
                continue;
            };
            if outer_label == caller {
                right += sample.count;
            } else {
                *wrong.entry((outer_label, label)).or_default() += sample.count;
            }
        }
    }
    let all = right + wrong.values().sum::<u64>();
    ensure!(
        right > 0 && right as f64 >= (1.0 - IN_DOUBT) * all as f64,
        "{right} of {all} are called as they should, {wrong:?}"
    );
    Ok(())
}

/// All parts of `shares.rb`.
#[must_use]
pub fn parts() -> Vec<(&'static str, String)> {
    let in_ruby = PARTS
        .iter()
        .map(|(part, chain)| (*part, format!("{UNDER}{chain}")));
    let (part, chain) = C_THREAD;
    in_ruby.chain([(part, chain.to_owned())]).collect()
}

/// How many samples are exactly which chain.
#[derive(Debug, Default)]
pub struct Found {
    /// All samples.
    pub all: u64,
    by_part: BTreeMap<&'static str, u64>,
    others: Vec<(u64, Vec<Link>)>,
}

/// Which sample of a profile is which of these chains.
#[must_use]
pub fn by_part(profile: &Read, view: View, chains: &[(&'static str, String)]) -> Found {
    let mut found = Found::default();
    for sample in &profile.samples {
        let stack = Link::all(sample, profile);
        found.all += sample.count;
        // Where no native frames are shown, a thread without Ruby has a word
        // that says so.
        let nothing = view.native == NativeFrames::None
            && stack.iter().all(|link| matches!(link, Link::Marker(_)));
        let part = if nothing {
            Some(C_THREAD.0)
        } else {
            let mut chains = chains.iter();
            chains
                .find(|(part, chain)| {
                    // Which would be any stack.
                    let is_void = view.native == NativeFrames::None && *part == C_THREAD.0;
                    !is_void && chains::is(&stack, chain, view)
                })
                .map(|(part, _)| *part)
        };
        match part {
            Some(part) => *found.by_part.entry(part).or_default() += sample.count,
            None => found.others.push((sample.count, stack)),
        }
    }
    found
        .others
        .sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    found
}

impl Found {
    /// Samples of that chain.
    #[must_use]
    pub fn count(&self, part: &str) -> u64 {
        self.by_part.get(part).copied().unwrap_or(0)
    }

    /// Samples of any of them.
    #[must_use]
    pub fn known(&self) -> u64 {
        self.by_part.values().sum()
    }

    /// Each of the chains is there, and of anything else this share at most.
    ///
    /// # Errors
    /// If one is not, or there is more.
    pub fn is_complete(&self, chains: &[(&'static str, String)], allowed: f64) -> Result<()> {
        ensure!(self.all >= ENOUGH, "{} samples", self.all);
        for (part, _) in chains {
            ensure!(self.count(part) > 0, "no sample of {part}: {self:#?}");
        }
        let others = self.all - self.known();
        let some: Vec<_> = self.others.iter().take(3).collect();
        eprintln!("  {others} of {} on their way, such as {some:?}", self.all);
        ensure!(
            others as f64 <= allowed * self.all as f64,
            "{others} of {} samples are in no chain, such as {:#?}",
            self.all,
            self.others.iter().take(10).collect::<Vec<_>>()
        );
        Ok(())
    }

    /// The shares are those that the program has measured.
    fn has_shares(&self, spent: &HashMap<String, u64>, points: f64) -> Result<()> {
        let of_all: u64 = spent.values().sum();
        let mut wrong = Vec::new();
        for (part, ns) in spent {
            let truth = *ns as f64 / of_all as f64;
            let share = self.count(part) as f64 / self.all as f64;
            let sigma = (truth * (1.0 - truth) / self.all as f64).sqrt();
            eprintln!(
                "  {part}: {:.2} % of {} samples, {:.2} % of CPU time, sigma {:.2}",
                share * 100.0,
                self.all,
                truth * 100.0,
                sigma * 100.0
            );
            ensure!(
                SIGMAS * sigma < points,
                "{} samples are too few for {part}",
                self.all
            );
            if (share - truth).abs() > points {
                wrong.push(part);
            }
        }
        ensure!(wrong.is_empty(), "wrong shares of {wrong:?}: {self:#?}");
        Ok(())
    }
}

/// The methods of the extension are in its file, where anything is known of that.
fn methods_are_in_their_file(profile: &Read, view: View) -> Result<()> {
    let mut seen = 0;
    for frame in profile.samples.iter().flat_map(|sample| &sample.frames) {
        let function = &frame.function;
        // What starts a thread is mostly met inside of the C library's `clone`,
        // whose native stack cannot be followed.
        if !function.label.starts_with("Burn.") || &*function.label == "Burn.c_thread" {
            continue;
        }
        seen += 1;
        let is_right = match view.native {
            NativeFrames::None => &*function.file == "<cfunc>",
            NativeFrames::Extensions | NativeFrames::All => is_the_extension(&function.file),
        };
        ensure!(
            is_right && function.kind == FunctionKind::CFunction,
            "{function:?}"
        );
    }
    ensure!(seen > 0, "no method of the extension");
    Ok(())
}

/// Whether that file is the extension.
#[must_use]
pub fn is_the_extension(file: &str) -> bool {
    Path::new(file).ends_with("burn.so")
}

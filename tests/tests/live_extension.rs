//! A C extension that burns CPU time in chains of functions, and that calls and
//! is called by Ruby code in all ways that there are: the command shows exactly
//! those chains, with the shares that the program itself has measured.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use rbprof::presentation::NativeFrames;
use rbprof::profile::FunctionKind;
use rbprof_tests::chains;
use rbprof_tests::chains::Link;
use rbprof_tests::chains::View;
use rbprof_tests::frames::Jit;
use rbprof_tests::pprof;
use rbprof_tests::pprof::Read;
use rbprof_tests::rig;
use rbprof_tests::target::Target;

const RBPROF: &str = env!("CARGO_BIN_EXE_rbprof-under-test");
/// A prime, so that nothing in the program keeps in step with it.
const FREQUENCY: u64 = 997;
/// Where each sample takes milliseconds.
const LOW_FREQUENCY: u64 = 97;
/// Largest error of a share.
const POINTS: f64 = 0.02;
/// Standard deviations of a share, as chance has it, that this must be more than.
const SIGMAS: f64 = 5.0;
/// CPU time in which shares are measured, milliseconds: enough for that.
const CPU_MS: u64 = 8_500;
/// CPU time where only the shape of stacks matters, milliseconds.
const SHAPE_MS: u64 = 2_000;
/// Largest share of stacks that are cut or in doubt.
const IN_DOUBT: f64 = 0.005;
/// Largest share of samples that are on their way from one chain to another.
const ON_THE_WAY: f64 = 0.015;
/// Of those in musl's own functions too: it has no unwind tables, so that the
/// native stack ends there.
const ON_THE_WAY_ON_MUSL: f64 = 0.05;
const MUSL: &str = "source-3.3.8-musl";
/// A Ruby with symbols.
const WITH_SYMBOLS: &str = "source-3.3.8-static";
/// Samples that are enough to speak of shapes.
const ENOUGH: u64 = 100;
/// Largest share of samples without names: under a busy collector, one that is
/// needed for the first time may be withheld.
const NAMELESS: f64 = 0.02;
/// Levels at which C code calls a block that calls C code.
const LEVELS: usize = 1_000;
/// Largest share of samples that are on their way there.
const GETTING_THERE: f64 = 0.03;
/// What is counted of stacks that are not as they should be.
const DOUBTS: [&str; 7] = [
    "samples lost, ring full",
    MISSING,
    "stacks with native frames in doubt",
    "stacks cut, too deep",
    "stacks cut, memory unreadable",
    "stacks with an unknown frame",
    "unreadable Ruby stacks",
];

const MISSING: &str = "stacks with native frames missing";

/// What `shares.rb` does, and the stack that it has meanwhile, as
/// [`rbprof_tests::chains`] writes it.
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
const UNDER: &str = "^;<main>;Spend.on;block in <main>;";
/// The part in a thread without Ruby.
const C_THREAD: (&str, &str) = (
    "c_thread",
    "$;:thread_main;:burn_outer;:burn_middle;:burn_leaf",
);

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
fn shares_on_3_3_8_static() -> Result<()> {
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
    let task = Task {
        stripped: true,
        native: &[NativeFrames::Extensions],
        ..Task::new("debian-3.1.2", "shares.rb")
    };
    let Some(run) = task.run()? else {
        return Ok(());
    };
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
    for name in ["debian-3.1.2", "source-3.3.8-static"] {
        let task = Task {
            environment: &[("LATE", "1")],
            native: &[NativeFrames::Extensions],
            ..Task::new(name, "shares.rb")
        };
        let Some(run) = task.run()? else {
            return Ok(());
        };
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
        let levels = LEVELS.to_string();
        let task = Task {
            environment: &[("LEVELS", &levels)],
            frequency: LOW_FREQUENCY,
            ..Task::new(name, "nest.rb")
        };
        let Some(run) = task.run()? else {
            return Ok(());
        };
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
    const CPU: &str = "Burn.cpu;~;:burn_cpu;:burn_outer;:burn_middle;:burn_leaf";
    const BLOCK: &str = "Burn.with_block;~;:burn_with_block;:block_outer;:block_middle;:block_leaf";
    let chains = [
        ("thread", format!("^;block in Roots.thread;{CPU}")),
        ("fiber", format!("^;block in Roots.fiber;{BLOCK}")),
        (
            "block in fiber",
            format!("^;block in Roots.fiber;{BLOCK};~;block (2 levels) in Roots.fiber;Roots.spin"),
        ),
        (
            "fiber in thread",
            format!("^;block (2 levels) in Roots.both;{CPU}"),
        ),
        ("ractor", "^;block in Roots.ractor;Roots.spin".to_owned()),
    ];
    for (name, ractors) in [
        ("debian-2.7.4", false),
        ("debian-3.1.2", true),
        ("source-3.3.8-stripped", true),
        ("debian-3.4.11", true),
    ] {
        let Some(run) = Task::new(name, "roots.rb").run()? else {
            return Ok(());
        };
        run.is_beyond_doubt()?;
        let chains = &chains[..chains.len() - usize::from(!ractors)];
        for (view, profile) in &run.profiles {
            // Threads are made and ended all the time.
            let found = by_part(profile, *view, chains);
            eprintln!("{name}: {found:#?}");
            for (part, _) in chains {
                let count = found.count(part);
                ensure!(count * 50 > found.all, "{name}: {count} of {part}");
            }
            ensure!(
                found.known() * 10 >= found.all * 9,
                "{name}: {} of {} are known",
                found.known(),
                found.all
            );
        }
    }
    Ok(())
}

#[test]
fn activations_that_are_left_by_jumps_are_gone() -> Result<()> {
    for name in ["debian-2.7.4", "source-3.3.8-stripped", "debian-3.4.11"] {
        let Some(run) = Task::new(name, "jumps.rb").run()? else {
            return Ok(());
        };
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

fn shares_are_right(name: &str, jit: Jit) -> Result<()> {
    let task = Task {
        jit,
        cpu_ms: CPU_MS,
        native: &[
            NativeFrames::Extensions,
            NativeFrames::All,
            NativeFrames::None,
        ],
        ..Task::new(name, "shares.rb")
    };
    let Some(run) = task.run()? else {
        return Ok(());
    };
    run.is_beyond_doubt()?;
    let parts = parts();
    let on_the_way = if name == MUSL {
        ON_THE_WAY_ON_MUSL
    } else {
        ON_THE_WAY
    };
    for (view, profile) in &run.profiles {
        let found = by_part(profile, *view, &parts);
        eprintln!("{name}, {:?}:", view.native);
        found.has_shares(&run.spent)?;
        found.is_complete(&parts, on_the_way)?;
        methods_are_in_their_file(profile, *view)?;
        if name == WITH_SYMBOLS && view.native == NativeFrames::All {
            interpreter_is_as_in_its_source(profile)?;
        }
    }
    Ok(())
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
fn parts() -> Vec<(&'static str, String)> {
    let in_ruby = PARTS
        .iter()
        .map(|(part, chain)| (*part, format!("{UNDER}{chain}")));
    let (part, chain) = C_THREAD;
    in_ruby.chain([(part, chain.to_owned())]).collect()
}

/// How many samples are exactly which chain.
#[derive(Debug, Default)]
struct Found {
    all: u64,
    by_part: BTreeMap<&'static str, u64>,
    others: Vec<(u64, Vec<Link>)>,
}

fn by_part(profile: &Read, view: View, chains: &[(&'static str, String)]) -> Found {
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
    fn count(&self, part: &str) -> u64 {
        self.by_part.get(part).copied().unwrap_or(0)
    }

    fn known(&self) -> u64 {
        self.by_part.values().sum()
    }

    /// Each of the chains is there, and of anything else this share at most.
    fn is_complete(&self, chains: &[(&'static str, String)], allowed: f64) -> Result<()> {
        ensure!(self.all >= ENOUGH, "{} samples", self.all);
        for (part, _) in chains {
            ensure!(self.count(part) > 0, "no sample of {part}: {self:#?}");
        }
        let others = self.all - self.known();
        eprintln!("  {others} of {} on their way", self.all);
        ensure!(
            others as f64 <= allowed * self.all as f64,
            "{others} of {} samples are in no chain, such as {:#?}",
            self.all,
            self.others.iter().take(10).collect::<Vec<_>>()
        );
        Ok(())
    }

    /// The shares are those that the program has measured.
    fn has_shares(&self, spent: &HashMap<String, u64>) -> Result<()> {
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
                SIGMAS * sigma < POINTS,
                "{} samples are too few for {part}",
                self.all
            );
            if (share - truth).abs() > POINTS {
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

fn is_the_extension(file: &str) -> bool {
    Path::new(file).ends_with("burn.so")
}

/// A program to run and record.
struct Task<'a> {
    ruby: &'a str,
    script: &'a str,
    jit: Jit,
    /// With the extension that has no symbols.
    stripped: bool,
    cpu_ms: u64,
    frequency: u64,
    environment: &'a [(&'a str, &'a str)],
    /// It is recorded by as many commands at the same time.
    native: &'a [NativeFrames],
}

/// What came of it.
struct Run<'a> {
    ruby: &'a str,
    /// By how they were recorded.
    profiles: Vec<(View, Read)>,
    /// CPU time by part, nanoseconds.
    spent: HashMap<String, u64>,
}

impl<'a> Task<'a> {
    const fn new(ruby: &'a str, script: &'a str) -> Self {
        Self {
            ruby,
            script,
            jit: Jit::Off,
            stripped: false,
            cpu_ms: SHAPE_MS,
            frequency: FREQUENCY,
            environment: &[],
            native: &[NativeFrames::Extensions, NativeFrames::All],
        }
    }

    fn run(&self) -> Result<Option<Run<'a>>> {
        let run = self.record();
        run.with_context(|| format!("{} on {}", self.script, self.ruby))
    }

    fn record(&self) -> Result<Option<Run<'a>>> {
        let Some(ruby) = rig::ruby(self.ruby)? else {
            return Ok(None);
        };
        let Some(extension) = rig::extension(&ruby)? else {
            return Ok(None);
        };
        let folder = if self.stripped {
            extension.stripped
        } else {
            extension.folder
        };
        let script = rig::workload("extension").join(self.script);
        let mut target = Target::start(
            ruby.script(&script)?
                .env("RUBYOPT", format!("-W0 {}", self.jit.rubyopt()))
                .env("RUBYLIB", folder)
                .env("CPU_MS", self.cpu_ms.to_string())
                .envs(self.environment.iter().copied()),
        )?;
        target.wait_for("ready")?;
        let directory = tempfile::tempdir()?;
        let mut recordings = Vec::new();
        for &native in self.native {
            let file = directory.path().join(format!("{native:?}.pb.gz"));
            recordings.push((
                native,
                Recording::start(target.pid(), native, self.frequency, &file)?,
                file,
            ));
        }
        for (_, recording, _) in &recordings {
            rig::wait_until_recording(recording.0.id())?;
        }
        target.go_on()?;
        let said = target.wait_for("finished")?;
        let mut profiles = Vec::new();
        for (native, recording, file) in recordings {
            recording.finish()?;
            let view = View {
                native,
                jit: self.jit,
                stripped: self.stripped,
            };
            profiles.push((view, pprof::read(&std::fs::read(file)?)?));
        }
        target.go_on()?;
        ensure!(target.end()?.success(), "the program failed");
        let spent = said
            .iter()
            .filter_map(|line| line.strip_prefix("spent\t")?.split_once('\t'))
            .map(|(part, ns)| Ok((part.to_owned(), ns.parse()?)))
            .collect::<Result<_>>()?;
        Ok(Some(Run {
            ruby: self.ruby,
            profiles,
            spent,
        }))
    }
}

impl Run<'_> {
    /// Hardly a stack has missing frames, or may be wrong.
    fn is_beyond_doubt(&self) -> Result<()> {
        for (view, profile) in &self.profiles {
            let all: u64 = profile.samples.iter().map(|sample| sample.count).sum();
            for what in DOUBTS {
                // Nobody knows what musl's functions have saved where, and with
                // one of those every thread starts.
                if what == MISSING && self.ruby == MUSL {
                    continue;
                }
                let count = profile.counter(what)?;
                if count > 0 {
                    eprintln!("{:?}: {what}: {count} of {all}", view.native);
                }
                ensure!(
                    count as f64 <= IN_DOUBT * all as f64,
                    "{:?}: {what}: {count} of {all}",
                    view.native
                );
            }
        }
        Ok(())
    }
}

/// The command, at work; killed when dropped.
struct Recording(Child);

impl Recording {
    fn start(pid: u32, native: NativeFrames, frequency: u64, file: &Path) -> Result<Self> {
        let native = match native {
            NativeFrames::Extensions => "extensions",
            NativeFrames::All => "all",
            NativeFrames::None => "none",
        };
        let child = Command::new(RBPROF)
            .args(["record", "-q", "--native", native])
            .args(["-F", &frequency.to_string()])
            .args(["--pid", &pid.to_string(), "-o"])
            .arg(file)
            .stdin(Stdio::null())
            .spawn()?;
        Ok(Self(child))
    }

    /// Ends it as Ctrl-C does.
    fn finish(mut self) -> Result<()> {
        let pid = self.0.id().to_string();
        let interrupted = Command::new("kill").args(["-INT", &pid]).status()?;
        ensure!(interrupted.success(), "kill: {interrupted}");
        let status = self.0.wait()?;
        if !status.success() {
            bail!("rbprof: {status}");
        }
        Ok(())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

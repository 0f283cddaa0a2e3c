//! The agent itself: everything that happens, in one loop.

use std::collections::VecDeque;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::Signal;
use tokio::signal::unix::SignalKind;
use tokio::signal::unix::signal;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::batch::Batch;
use super::budget;
use super::budget::Budget;
use super::collect::Collector;
use super::config::Config;
use super::config::ConfigError;
use super::config::Reload;
use super::http::Backend;
use super::http::Server;
use super::http::backend::Recent;
use super::http::backend::Refusal;
use super::http::backend::Request;
use super::http::backend::Selector;
use super::journal;
use super::overview::Overview;
use super::registry::Registry;
use super::sinks::Sinks;
use super::systemd::Notice;
use super::systemd::watchdog_interval;
use crate::kernel;
use crate::kernel::KernelError;
use crate::output::plain;
use crate::presentation::NativeFrames;
use crate::session::Session;
use crate::session::cut::Cut;

/// How often records are looked for that did not wake anybody, and cuts whose
/// names are there.
const POLL: Duration = Duration::from_millis(100);
/// The same while a Ruby is starting, or has just been found.
const POLL_SOON: Duration = Duration::from_millis(5);
/// How often `/proc` is looked through where Rubies are not announced.
const LOOK_THROUGH: Duration = Duration::from_secs(10);
/// How long the end may take: systemd and people wait for longer than that.
const END: Duration = Duration::from_millis(4500);
/// How much of it is for names of machine code.
const NAMES_AT_END: Duration = Duration::from_secs(1);
/// How long a connection may go on then.
const HTTP_AT_END: Duration = Duration::from_millis(1500);
/// A profile with more frames, locations or counts than that ends early: 1 GB is
/// far more.
const MAX_FOOTPRINT: usize = 1 << 20;

/// Reads the configuration again.
pub type Reread = Box<dyn Fn() -> Result<Config, ConfigError>>;

/// Profiles every Ruby on the machine that the configuration selects, until a
/// signal says to end (`SIGTERM`, `SIGINT`).
///
/// # Errors
/// When it cannot start: an address is taken, a directory cannot be used, or the
/// kernel does not let it profile. What goes wrong later is logged and counted.
pub fn run(config: Config, reread: Reread) -> anyhow::Result<ExitCode> {
    journal::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting")?;
    let ended = runtime.block_on(serve(config, reread));
    // A page that is being drawn is for nobody.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}

async fn serve(config: Config, reread: Reread) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    // What can be wrong with the configuration is found out first.
    let mut listeners = Vec::new();
    for address in &config.http.listen {
        listeners.push(address.bind(config.http.socket_mode).await?);
    }
    let (backend, mut requests) = Backend::new();
    let server = Server::new(&config.http, backend);
    let (stop, stopped) = watch::channel(false);
    let sinks = Sinks::start(config.sinks.clone())?;

    let mut agent = Agent::start(config, reread, sinks)?;
    tell(Notice::Ready);
    let line = agent.overview().line();
    log::info!("{line}");
    tell(Notice::Status(&line));

    let mut server = pin!(server.run(listeners, stopped));
    let mut is_serving = true;
    {
        let mut work = pin!(agent.work(&mut requests, &mut signals));
        loop {
            tokio::select! {
                ended = &mut work => break ended?,
                () = &mut server, if is_serving => is_serving = false,
            }
        }
    }
    let deadline = Instant::now() + END;
    tell(Notice::Stopping);
    log::info!("ending");
    // Profiles that somebody waits for end now, so the connections can.
    let sinks = agent.end();
    drop(requests);
    // An error means that nobody serves.
    let _ = stop.send(true);
    let (lost, ()) = tokio::join!(sinks.shutdown(deadline), async {
        if is_serving {
            let _ = tokio::time::timeout(HTTP_AT_END, server).await;
        }
    });
    if lost != 0 {
        log::error!("{lost} profiles are lost: there was no time, and no spill, to keep them");
    }
    Ok(())
}

/// Signals that say something.
struct Signals {
    hangup: Signal,
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("listening for signals");
        Ok(Self {
            hangup: listen(SignalKind::hangup())?,
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }
}

/// What goes wrong and is no reason to end.
#[derive(Debug, Default)]
struct Troubles {
    count: u64,
    last: Option<String>,
    at: Option<Instant>,
}

impl Troubles {
    /// How long something that went wrong is told of.
    const RECENT: Duration = Duration::from_secs(60);

    fn add(&mut self, what: &str, error: &dyn std::error::Error) {
        let text = format!("{what}: {error}");
        self.count += 1;
        self.at = Some(Instant::now());
        if self.last.as_ref() != Some(&text) {
            log::error!("{text}");
            self.last = Some(text);
        }
    }

    fn recent(&self) -> (u64, Option<&str>) {
        let is_recent = self.at.is_some_and(|at| at.elapsed() < Self::RECENT);
        let last = self.last.as_deref().filter(|_| is_recent);
        (self.count, last)
    }
}

struct Agent {
    config: Config,
    reread: Reread,
    session: Session,
    registry: Registry,
    collector: Collector,
    budget: Budget,
    sinks: Sinks,
    recent: VecDeque<Recent>,
    next_recent: u64,
    profiles: u64,
    troubles: Troubles,
    looked_through: Instant,
    alive: Option<(Duration, Instant)>,
}

impl Agent {
    /// Loads the kernel half, finds the Rubies that there are, and begins to tick.
    fn start(config: Config, reread: Reread, sinks: Sinks) -> anyhow::Result<Self> {
        let native = config.presentation.native;
        let mut session = Session::new(&kernel::Options {
            frequency: u64::from(config.frequency),
            kernel_frames: config.presentation.kernel && native != NativeFrames::None,
            discover: kernel::Discover::Probe,
            ..kernel::Options::default()
        })?;
        match native {
            NativeFrames::None => {}
            NativeFrames::Extensions => session.walk_native(true)?,
            NativeFrames::All => session.walk_native(false)?,
        }
        let registry = Registry::new(config.selection.clone(), config.services.clone());
        session.discover(Box::new(registry.clone()));
        if let Some(why) = session.kernel().without_probe() {
            log::debug!("no probe for mappings: {why}");
        }
        match session.kernel().announcer() {
            Ok(announcer) => log::info!("Rubies that start are told of by {announcer}"),
            Err(silence) => log::warn!(
                "Rubies are not announced by the kernel, so /proc is looked through every {} s, \
                 and those that end sooner are missed: {silence}",
                LOOK_THROUGH.as_secs()
            ),
        }
        // Those that there are; others have been announced from the start.
        session.look_through_proc()?;
        session.poll()?;
        session.start()?;
        let now = Instant::now();
        let frequency = u64::from(config.frequency);
        Ok(Self {
            collector: Collector::new(config.interval, now),
            // What the start takes is spent once.
            budget: Budget::new(
                config.cpu_budget,
                frequency,
                now + budget::WINDOW,
                budget::own_cpu_time(),
            ),
            config,
            reread,
            session,
            registry,
            sinks,
            recent: VecDeque::new(),
            next_recent: 1,
            profiles: 0,
            troubles: Troubles::default(),
            looked_through: now,
            alive: watchdog_interval().map(|interval| (interval / 3, now)),
        })
    }

    /// Does everything, until a signal says to end.
    async fn work(
        &mut self,
        requests: &mut mpsc::Receiver<Request>,
        signals: &mut Signals,
    ) -> anyhow::Result<()> {
        let wakeup = self.session.wakeup()?;
        // SAFETY: the descriptor is owned by what is registered, so it stays open
        // and the same until it is deregistered.
        let ring = unsafe { AsyncFd::register_with_interest(wakeup, Interest::READABLE) }
            .context("watching the ring buffer")?;
        let mut second = tokio::time::interval(Duration::from_secs(1));
        second.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut polled = Instant::now();
        let mut is_served = true;
        loop {
            let pause = if self.session.is_in_haste() {
                POLL_SOON
            } else {
                POLL
            };
            let mut next = polled + pause;
            if let Some(due) = self.collector.due() {
                next = next.min(due);
            }
            tokio::select! {
                guard = ring.readable() => {
                    // Cleared first: what comes during the poll wakes again.
                    guard.context("watching the ring buffer")?.clear_ready();
                    self.poll();
                }
                () = tokio::time::sleep_until(next.into()) => {
                    polled = Instant::now();
                    self.poll();
                }
                _ = second.tick() => self.every_second(),
                request = requests.recv(), if is_served => match request {
                    Some(request) => self.answer(request),
                    // The server has ended, and will not come back.
                    None => is_served = false,
                },
                _ = signals.hangup.recv() => self.reload(),
                _ = signals.interrupt.recv() => return Ok(()),
                _ = signals.terminate.recv() => return Ok(()),
            }
        }
    }

    /// Takes what the kernel half has sent, and ends profiles that are due.
    fn poll(&mut self) {
        if let Err(error) = self.session.poll() {
            self.troubles.add("taking samples", &error);
        }
        let now = Instant::now();
        if self.registry.takes_reuse() || self.collector.due().is_some_and(|due| due <= now) {
            self.cut();
        }
        self.collect(now);
    }

    fn cut(&mut self) {
        match self.session.cut() {
            Ok(cut) => self.collector.push(cut, Instant::now()),
            Err(error) => self.cannot_cut(&error),
        }
    }

    fn cannot_cut(&mut self, error: &KernelError) {
        self.troubles.add("ending a profile", error);
    }

    /// Hands on what is complete. `now` may be a time to come.
    fn collect(&mut self, now: Instant) {
        if !self.collector.is_waiting() {
            return;
        }
        let (session, presentation) = (&self.session, self.config.presentation);
        let collected = self.collector.collect(now, &self.registry, |cut: Cut| {
            session.present_cut(cut, presentation)
        });
        for batches in collected.intervals {
            self.profiles += 1;
            self.sinks.deliver(&batches);
            self.keep(batches);
            self.look_again_at_all();
        }
        if let Some(by) = collected.by {
            self.registry.forget_ended(by);
        }
    }

    fn keep(&mut self, batches: Vec<Batch>) {
        for batch in batches {
            let id = self.next_recent;
            self.next_recent += 1;
            self.recent.push_back(Recent { id, batch });
        }
        while self.recent.len() > self.config.http.recent {
            self.recent.pop_front();
        }
    }

    fn every_second(&mut self) {
        let now = Instant::now();
        if let Err(error) = self.session.every_second() {
            self.troubles.add("following CPUs", &error);
        }
        let changed = self.registry.look_at_new(now);
        self.select(&changed);
        let is_silent = self.session.kernel().announcer().is_err();
        if is_silent && now.duration_since(self.looked_through) >= LOOK_THROUGH {
            self.looked_through = now;
            if let Err(error) = self.session.look_through_proc() {
                self.troubles.add("looking for Rubies", &error);
            }
        }
        let footprint = self.session.profile().footprint();
        if footprint
            .frames
            .max(footprint.locations)
            .max(footprint.counts)
            > MAX_FOOTPRINT
        {
            self.collector.end_interval(now);
            self.cut();
        }
        if let Some(frequency) = self.budget.check(now, budget::own_cpu_time()) {
            self.tick_at(frequency);
        }
        tell(Notice::Status(&self.overview().line()));
        if let Some((interval, at)) = &mut self.alive
            && now.duration_since(*at) >= *interval
        {
            *at = now;
            tell(Notice::Alive);
        }
    }

    /// Ticks so often from now on. What a sample stands for changes with it, so
    /// all profiles end here.
    fn tick_at(&mut self, frequency: u64) {
        log::info!(
            "{:.2} % of a CPU used, {:.2} % allowed: sampling at {frequency} Hz from now on",
            self.budget.last() * 100.0,
            self.config.cpu_budget * 100.0
        );
        let now = Instant::now();
        match self.session.set_frequency(frequency) {
            Ok(cut) => {
                self.collector.end_all(now);
                self.collector.push(cut, now);
            }
            Err(error) => self.troubles.add("changing the frequency", &error),
        }
    }

    fn select(&mut self, changed: &[(u32, bool)]) {
        for &(pid, is_selected) in changed {
            if let Err(error) = self.session.select(pid, is_selected) {
                self.troubles.add("selecting a process", &error);
            }
        }
    }

    fn look_again_at_all(&mut self) {
        let changed = self.registry.look_at_all();
        self.select(&changed);
    }

    /// Reads the configuration again.
    fn reload(&mut self) {
        tell(Notice::Reloading);
        match (self.reread)() {
            Ok(new) => {
                log::info!("the configuration was read again");
                self.apply(new);
            }
            Err(error) => {
                for problem in &error.problems {
                    log::error!("nothing is changed: {problem}");
                }
            }
        }
        tell(Notice::Ready);
    }

    fn apply(&mut self, new: Config) {
        for (key, when) in self.config.settings.changes(&new.settings) {
            match when {
                Reload::Live => log::info!("{key} has another value from now on"),
                Reload::Restart => log::warn!("{key} has another value, but from a restart on"),
            }
        }
        let now = Instant::now();
        let Config {
            interval,
            cpu_budget,
            selection,
            services,
            settings,
            ..
        } = new;
        self.collector.set_interval(interval);
        self.budget.set_share(cpu_budget);
        self.registry.set_rules(selection.clone(), services.clone());
        self.looked_through = now;
        self.config = Config {
            interval,
            cpu_budget,
            selection,
            services,
            settings,
            ..self.config.clone()
        };
        self.look_again_at_all();
    }

    /// Answers somebody.
    fn answer(&mut self, request: Request) {
        match request {
            Request::Profile {
                of,
                duration,
                reply,
            } => match self.refusal(&of) {
                Some(refusal) => drop(reply.send(Err(refusal))),
                None => {
                    self.poll();
                    self.cut();
                    let now = Instant::now();
                    self.collector.ask(of, duration, reply, now);
                }
            },
            Request::Recent { reply } => drop(reply.send(self.recent.iter().cloned().collect())),
            Request::Targets { reply } => drop(reply.send(self.registry.targets())),
            Request::Metrics { reply } => drop(reply.send(self.overview().page())),
            Request::Health { reply } => drop(reply.send(self.overview().health())),
        }
    }

    fn refusal(&self, of: &Selector) -> Option<Refusal> {
        let missing = match of {
            Selector::All => None,
            Selector::Process(pid) => (!self.registry.is_selected(*pid))
                .then(|| format!("process {pid} is not profiled; /targets lists those that are")),
            Selector::Service(name) => (!self.registry.has_service(name)).then(|| {
                format!(
                    "no process of service {} is profiled; /targets lists those that are",
                    plain(name)
                )
            }),
        };
        missing
            .map(Refusal::NotFound)
            .or_else(|| self.collector.refusal())
    }

    fn overview(&mut self) -> Overview<'_> {
        let counters = self.session.counters().unwrap_or_default();
        Overview {
            numbers: self.registry.numbers(),
            events: self.registry.events(),
            account: *self.session.account(),
            counters,
            cpu_time: budget::own_cpu_time(),
            dropped: self.collector.dropped(),
            profiles: self.profiles,
            objects: self
                .session
                .objects()
                .map_or(0, |objects| objects.all().count()),
            sinks: self.sinks.status(),
            troubles: self.troubles.recent(),
            budget: &self.budget,
            silence: self.session.kernel().announcer().err(),
        }
    }

    /// Ends all profiles and hands them on. Gives the sinks, to be waited for.
    fn end(mut self) -> Sinks {
        if let Err(error) = self.session.kernel().stop() {
            self.troubles.add("ending", &error);
        }
        if let Err(error) = self.session.poll() {
            self.troubles.add("taking the last samples", &error);
        }
        let now = Instant::now();
        self.collector.end_all(now);
        self.cut();
        self.collector.wait(NAMES_AT_END);
        // What has no name by now has none.
        self.collector
            .collect_all(&self.registry, |cut| {
                self.session.present_cut(cut, self.config.presentation)
            })
            .into_iter()
            .for_each(|batches| self.sinks.deliver(&batches));
        self.sinks
    }
}

/// Tells the service manager, if there is one.
fn tell(notice: Notice<'_>) {
    if let Err(error) = notice.send() {
        log::debug!("telling the service manager: {error}");
    }
}

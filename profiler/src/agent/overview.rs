//! What the agent counts and how it is, for `/metrics`, `/healthz` and the
//! service manager.

use std::time::Duration;
use std::time::SystemTime;

use rbprof_common::wire::Counter;

use super::budget::Budget;
use super::http::backend::Health;
use super::metrics::Page;
use super::metrics::Unit;
use super::registry::Events;
use super::registry::Numbers;
use super::sinks::counters::SinkStatus;
use crate::kernel::Counters;
use crate::session::account::Account;

/// What is counted, at one moment.
#[derive(Debug)]
pub struct Overview<'a> {
    /// How many processes there are.
    pub numbers: Numbers,
    /// What has happened to processes.
    pub events: Events,
    /// What user space counts.
    pub account: Account,
    /// What the kernel half counts.
    pub counters: Counters,
    /// CPU time and frequency.
    pub budget: &'a Budget,
    /// CPU time of this process.
    pub cpu_time: Duration,
    /// Samples there was no room for.
    pub dropped: u64,
    /// Profiles of intervals so far.
    pub profiles: u64,
    /// Why Rubies are not announced.
    pub silence: Option<&'a str>,
    /// What went wrong in the core, and how often.
    pub troubles: (u64, Option<&'a str>),
    /// Code that native frames are walked in: files known.
    pub objects: usize,
    /// The sinks.
    pub sinks: Vec<SinkStatus>,
}

impl Overview<'_> {
    /// All of it, for Prometheus.
    #[must_use]
    pub fn page(&self) -> Page {
        let mut page = Page::default();
        self.processes(&mut page);
        self.samples(&mut page);
        self.own(&mut page);
        self.sinks(&mut page);
        page
    }

    fn processes(&self, page: &mut Page) {
        let state = |name: &str| vec![("state", name.to_owned())];
        page.gauges(
            "targets",
            "Processes with a Ruby, by what is done with them",
            None,
            [
                ("profiled", self.numbers.profiled),
                ("starting", self.numbers.starting),
                ("not_selected", self.numbers.not_selected),
                ("given_up", self.numbers.given_up),
            ]
            .map(|(name, number)| (state(name), float(number as u64))),
        );
        let event = |name: &str| vec![("event", name.to_owned())];
        page.counters(
            "target_events",
            "What has happened to processes with a Ruby",
            None,
            [
                ("appeared", self.events.appeared),
                ("attached", self.events.attached),
                ("given_up", self.events.given_up),
                ("ended", self.events.ended),
                ("ended_before_attached", self.events.missed),
            ]
            .map(|(name, number)| (event(name), number)),
        );
        page.gauge(
            "discovery_works",
            "Whether Rubies are announced by the kernel (1), or looked for in /proc (0)",
            None,
            float(u64::from(self.silence.is_none())),
        );
    }

    fn samples(&self, page: &mut Page) {
        let of = |counter| self.counters.get(counter);
        page.counter(
            "samples_due",
            "Ticks that hit a process that is profiled, or was to be",
            of(Counter::Hit),
        );
        page.counter(
            "samples_not_selected",
            "Those that hit a process before it was clear that no rule selects it",
            self.account.not_selected,
        );
        page.counters(
            "samples",
            "Samples in profiles, by whether they have frames",
            None,
            [
                ("yes", self.account.with_frames),
                ("no", self.account.without_frames),
            ]
            .map(|(has, number)| (vec![("frames", has.to_owned())], number)),
        );
        page.counters(
            "samples_lost",
            "Samples that are in no profile, by reason",
            None,
            [
                ("ring_full", of(Counter::LostSample)),
                ("frames_unknown", self.account.lost_frames),
                ("too_many_processes", self.dropped),
            ]
            .map(|(reason, number)| (vec![("reason", reason.to_owned())], number)),
        );
        page.counters(
            "stacks_incomplete",
            "Samples whose stack is not whole, by reason",
            None,
            [
                ("too_deep", of(Counter::Truncated)),
                ("memory_unreadable", of(Counter::Fault)),
                ("frame_unknown", of(Counter::UnknownFrame)),
                ("native_frames_missing", of(Counter::NativeCut)),
                ("ruby_stack_unreadable", of(Counter::BadContext)),
                ("name_unreadable", self.account.unreadable),
                ("name_withheld", self.account.disbelieved),
            ]
            .map(|(reason, number)| (vec![("reason", reason.to_owned())], number)),
        );
        page.counter(
            "process_events_lost",
            "Starts, forks and ends of processes that did not fit into the ring",
            of(Counter::LostEvent) + of(Counter::LostChild),
        );
    }

    fn own(&self, page: &mut Page) {
        let (frequency, configured) = self.budget.frequencies();
        page.gauge(
            "frequency_hertz",
            "Samples per second and CPU, now",
            None,
            float(frequency),
        );
        page.gauge(
            "frequency_configured_hertz",
            "Samples per second and CPU, as configured",
            None,
            float(configured),
        );
        page.gauges(
            "cpu",
            "CPU time used, in the last half minute, as a share of one CPU",
            Some(Unit::Other("ratio".to_owned())),
            [(Vec::new(), self.budget.last())],
        );
        page.time("cpu", "CPU time used", self.cpu_time);
        if let Some(resident) = resident() {
            page.gauge(
                "resident_memory",
                "Resident memory",
                Some(Unit::Bytes),
                float(resident),
            );
        }
        page.gauge(
            "code_files",
            "Files of machine code that are known",
            None,
            float(self.objects as u64),
        );
        page.counter(
            "profiles",
            "Intervals whose profiles were made",
            self.profiles,
        );
        page.counter(
            "errors",
            "Errors in the core, such as a kernel that refuses",
            self.troubles.0,
        );
    }

    fn sinks(&self, page: &mut Page) {
        let label = |sink: &SinkStatus| vec![("sink", sink.name.to_owned())];
        type Number = fn(&SinkStatus) -> u64;
        let counters: [(&'static str, &'static str, Number); 6] = [
            (
                "sink_delivered",
                "Profiles that are where they belong",
                |it| it.delivered,
            ),
            ("sink_delivered_bytes", "Their size, in bytes", |it| {
                it.delivered_bytes
            }),
            ("sink_retried", "Attempts that were made again", |it| {
                it.retried
            }),
            ("sink_errors", "Everything that went wrong", |it| it.errors),
            (
                "sink_spilled",
                "Profiles that were put into the spill",
                |it| it.spilled,
            ),
            ("sink_expired", "Files that retention removed", |it| {
                it.expired
            }),
        ];
        for (name, help, number) in counters {
            let values = self.sinks.iter().map(|sink| (label(sink), number(sink)));
            page.counters(name, help, None, values);
        }
        let gauges: [(&'static str, &'static str, Number); 4] = [
            ("sink_queued", "Profiles in memory", |it| it.queued),
            ("sink_queued_size", "Their size, in bytes", |it| {
                it.queued_bytes
            }),
            ("sink_spill", "Profiles in the spill", |it| it.spill_queued),
            ("sink_spill_size", "Their size, in bytes", |it| {
                it.spill_bytes
            }),
        ];
        for (name, help, number) in gauges {
            let values = self
                .sinks
                .iter()
                .map(|sink| (label(sink), float(number(sink))));
            page.gauges(name, help, None, values);
        }
        let dropped = self.sinks.iter().flat_map(|sink| {
            let why = &sink.dropped;
            [
                ("overflow", why.overflow),
                ("spill_full", why.spill_full),
                ("rejected", why.rejected),
                ("corrupt", why.corrupt),
                ("invalid", why.invalid),
            ]
            .map(|(reason, number)| {
                let mut labels = label(sink);
                labels.push(("reason", reason.to_owned()));
                (labels, number)
            })
        });
        page.counters(
            "sink_dropped",
            "Profiles that were given up, by reason",
            None,
            dropped,
        );
    }

    /// What is not well.
    #[must_use]
    pub fn health(&self) -> Health {
        let mut problems = Vec::new();
        if let Some(silence) = self.silence {
            problems.push(format!(
                "Rubies are not announced by the kernel, and looked for in /proc only every few \
                 seconds: {silence}"
            ));
        }
        if let (_, Some(trouble)) = self.troubles {
            problems.push(trouble.to_owned());
        }
        problems.extend(self.sinks.iter().filter_map(problem));
        Health { problems }
    }

    /// What the agent does, in a line.
    #[must_use]
    pub fn line(&self) -> String {
        let Numbers {
            profiled,
            starting,
            not_selected,
            given_up,
        } = self.numbers;
        let (frequency, configured) = self.budget.frequencies();
        let mut line = format!("profiling {profiled} Rubies at {frequency} Hz");
        if frequency < configured {
            line.push_str(&format!(" ({configured} Hz would exceed the CPU budget)"));
        }
        for (number, what) in [
            (starting, "starting"),
            (not_selected, "not selected"),
            (given_up, "not possible"),
        ] {
            if number != 0 {
                line.push_str(&format!(", {number} {what}"));
            }
        }
        let failing = self.sinks.iter().filter(|sink| problem(sink).is_some());
        let failing: Vec<&str> = failing.map(|sink| sink.name).collect();
        if !failing.is_empty() {
            line.push_str(&format!("; failing: {}", failing.join(", ")));
        }
        line
    }
}

/// What is wrong with a sink: its last attempt failed.
fn problem(sink: &SinkStatus) -> Option<String> {
    let error = sink.last_error.as_ref()?;
    let succeeded = sink.last_success.unwrap_or(SystemTime::UNIX_EPOCH);
    (error.at > succeeded).then(|| format!("{}: {}", sink.name, error.text))
}

/// Resident memory of this process, bytes.
fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[expect(clippy::cast_precision_loss, reason = "nobody counts so far")]
const fn float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::agent::sinks::counters::LastError;

    fn overview(budget: &Budget) -> Overview<'_> {
        let mut sink = SinkStatus::default();
        sink.name = "files";
        sink.delivered = 7;
        Overview {
            numbers: Numbers {
                profiled: 12,
                starting: 1,
                ..Numbers::default()
            },
            events: Events::default(),
            account: Account::default(),
            counters: Counters::default(),
            budget,
            cpu_time: Duration::from_millis(1500),
            dropped: 0,
            profiles: 3,
            silence: None,
            troubles: (0, None),
            objects: 5,
            sinks: vec![sink],
        }
    }

    #[test]
    fn numbers_are_on_the_page() {
        let budget = Budget::new(0.01, 19, Instant::now(), Duration::ZERO);
        let text = overview(&budget).page().render();
        for line in [
            "rbprof_targets{state=\"profiled\"} 12.0",
            "rbprof_frequency_hertz 19.0",
            "rbprof_cpu_seconds_total 1.5",
            "rbprof_cpu_ratio 0.0",
            "rbprof_sink_delivered_total{sink=\"files\"} 7",
            "rbprof_sink_dropped_total{sink=\"files\",reason=\"rejected\"} 0",
        ] {
            assert!(text.contains(&format!("\n{line}\n")), "{line}\n{text}");
        }
        assert!(text.contains("rbprof_resident_memory_bytes "));
    }

    #[test]
    fn a_sink_that_fails_is_a_problem_until_it_works() {
        let budget = Budget::new(0.01, 19, Instant::now(), Duration::ZERO);
        let mut overview = overview(&budget);
        assert_eq!(overview.health(), Health::default());
        assert_eq!(overview.line(), "profiling 12 Rubies at 19 Hz, 1 starting");
        let now = SystemTime::now();
        overview.sinks[0].last_error = Some(LastError {
            text: "disk full".to_owned(),
            at: now,
        });
        assert_eq!(overview.health().problems, ["files: disk full"]);
        assert!(overview.line().ends_with("; failing: files"));
        overview.sinks[0].last_success = Some(now);
        assert_eq!(overview.health(), Health::default());
    }
}

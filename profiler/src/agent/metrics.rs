//! What the agent counts, as an OpenMetrics page.
//!
//! Whoever counts keeps numbers of its own. For each scrape the core has them
//! put on a fresh [`Page`], which Prometheus and its kin read.

use std::fmt;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::encoding::NoLabelSet;
use prometheus_client::encoding::text;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
pub use prometheus_client::registry::Unit;

/// The content type of a rendered page.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// What all names begin with.
const PREFIX: &str = "rbprof";
/// Most values of one metric. What a target can influence, such as names of
/// services, must not make a page that nobody can read.
pub const MAX_VALUES: usize = 2000;
/// Most characters of a label's value.
const MAX_LABEL: usize = 256;

/// Names and values, such as `[("service", "shop")]`.
pub type Labels = Vec<(&'static str, String)>;

/// What is measured at one moment.
#[derive(Debug, Default)]
pub struct Page {
    metrics: Vec<Metric>,
    dropped: u64,
}

#[derive(Debug)]
struct Metric {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    values: Values,
}

#[derive(Debug)]
enum Values {
    Counters(Vec<(Labels, u64)>),
    Time(Duration),
    Gauges(Vec<(Labels, f64)>),
}

impl Page {
    /// Adds a number that only grows. `name`: without `rbprof_` and `_total`.
    pub fn counter(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.counters(name, help, None, [(Labels::new(), value)]);
    }

    /// Adds a time that only grows, in seconds.
    pub fn time(&mut self, name: &'static str, help: &'static str, value: Duration) {
        self.metrics.push(Metric {
            name,
            help,
            unit: Some(Unit::Seconds),
            values: Values::Time(value),
        });
    }

    /// Adds a number that goes up and down. `unit` becomes the end of its name.
    pub fn gauge(
        &mut self,
        name: &'static str,
        help: &'static str,
        unit: Option<Unit>,
        value: f64,
    ) {
        self.gauges(name, help, unit, [(Labels::new(), value)]);
    }

    /// Adds numbers that only grow, told apart by labels: at most
    /// [`MAX_VALUES`]. No labels may be there twice.
    pub fn counters(
        &mut self,
        name: &'static str,
        help: &'static str,
        unit: Option<Unit>,
        values: impl IntoIterator<Item = (Labels, u64)>,
    ) {
        let values = Values::Counters(self.bounded(values));
        self.metrics.push(Metric {
            name,
            help,
            unit,
            values,
        });
    }

    /// Adds numbers that go up and down, told apart by labels: at most
    /// [`MAX_VALUES`]. No labels may be there twice.
    pub fn gauges(
        &mut self,
        name: &'static str,
        help: &'static str,
        unit: Option<Unit>,
        values: impl IntoIterator<Item = (Labels, f64)>,
    ) {
        let values = Values::Gauges(self.bounded(values));
        self.metrics.push(Metric {
            name,
            help,
            unit,
            values,
        });
    }

    fn bounded<T>(&mut self, values: impl IntoIterator<Item = (Labels, T)>) -> Vec<(Labels, T)> {
        let mut values = values.into_iter();
        let kept = values
            .by_ref()
            .take(MAX_VALUES)
            .map(|(labels, value)| {
                let labels = labels
                    .into_iter()
                    .map(|(name, text)| (name, text.chars().take(MAX_LABEL).collect()))
                    .collect();
                (labels, value)
            })
            .collect();
        self.dropped += values.count() as u64;
        kept
    }

    /// The page, of [`CONTENT_TYPE`].
    #[must_use]
    pub fn render(mut self) -> String {
        let dropped = self.dropped;
        self.counter(
            "metrics_dropped",
            "Values that this page has no room for",
            dropped,
        );
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        match text::encode(&mut text, &registry) {
            Ok(()) => text,
            // Writing to a string does not fail.
            Err(fmt::Error) => "# EOF\n".to_owned(),
        }
    }
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for metric in &self.metrics {
            let kind = match metric.values {
                Values::Counters(_) | Values::Time(_) => MetricType::Counter,
                Values::Gauges(_) => MetricType::Gauge,
            };
            let mut all =
                encoder.encode_descriptor(metric.name, metric.help, metric.unit.as_ref(), kind)?;
            match &metric.values {
                Values::Counters(values) => {
                    for (labels, value) in values {
                        if labels.is_empty() {
                            all.encode_counter::<NoLabelSet, _, f64>(value, None)?;
                        } else {
                            all.encode_family(labels)?
                                .encode_counter::<NoLabelSet, _, f64>(value, None)?;
                        }
                    }
                }
                Values::Time(time) => {
                    all.encode_counter::<NoLabelSet, _, f64>(&time.as_secs_f64(), None)?;
                }
                Values::Gauges(values) => {
                    for (labels, value) in values {
                        if labels.is_empty() {
                            all.encode_gauge(value)?;
                        } else {
                            all.encode_family(labels)?.encode_gauge(value)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_openmetrics() {
        let mut page = Page::default();
        page.counter("samples", "Samples taken", 7);
        page.gauge("memory", "Resident memory", Some(Unit::Bytes), 1.5);
        page.time("busy", "Time busy", Duration::from_millis(1500));
        page.counters(
            "cpu",
            "Time used",
            Some(Unit::Seconds),
            [
                (vec![("service", "a\"b\\c\nd".to_owned())], 1),
                (
                    vec![("service", "x".to_owned()), ("pid", "7".to_owned())],
                    2,
                ),
            ],
        );
        assert_eq!(
            page.render(),
            "# HELP rbprof_samples Samples taken\n\
             # TYPE rbprof_samples counter\n\
             rbprof_samples_total 7\n\
             # HELP rbprof_memory_bytes Resident memory\n\
             # TYPE rbprof_memory_bytes gauge\n\
             # UNIT rbprof_memory_bytes bytes\n\
             rbprof_memory_bytes 1.5\n\
             # HELP rbprof_busy_seconds Time busy\n\
             # TYPE rbprof_busy_seconds counter\n\
             # UNIT rbprof_busy_seconds seconds\n\
             rbprof_busy_seconds_total 1.5\n\
             # HELP rbprof_cpu_seconds Time used\n\
             # TYPE rbprof_cpu_seconds counter\n\
             # UNIT rbprof_cpu_seconds seconds\n\
             rbprof_cpu_seconds_total{service=\"a\\\"b\\\\c\\nd\"} 1\n\
             rbprof_cpu_seconds_total{service=\"x\",pid=\"7\"} 2\n\
             # HELP rbprof_metrics_dropped Values that this page has no room for\n\
             # TYPE rbprof_metrics_dropped counter\n\
             rbprof_metrics_dropped_total 0\n\
             # EOF\n"
        );
    }

    #[test]
    fn a_page_has_an_end() {
        let mut page = Page::default();
        let long = "é".repeat(1000);
        page.gauges(
            "x",
            "x",
            None,
            (0..MAX_VALUES + 3).map(|at| (vec![("at", format!("{at}{long}"))], 1.0)),
        );
        let text = page.render();
        assert_eq!(text.matches("\nrbprof_x{").count(), MAX_VALUES);
        assert!(text.contains("rbprof_metrics_dropped_total 3\n"));
        assert!(
            text.lines()
                .all(|line| line.chars().count() < MAX_LABEL + 40)
        );
    }
}

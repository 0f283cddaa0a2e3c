//! HTML and JSON.

use std::fmt::Write as _;
use std::time::Duration;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use serde::Serialize;

use super::backend::Recent;
use super::backend::Target;

/// Text for an element or an attribute of HTML.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Text for a query.
fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                out.push(char::from(byte));
            }
            byte => push(&mut out, format_args!("%{byte:02X}")),
        }
    }
    out
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    let _ = out.write_fmt(text);
}

fn page(title: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{title} - rbprof</title>\
         <style>body{{font:14px/1.5 system-ui,sans-serif;margin:1.5em auto;max-width:75em;\
         padding:0 1em;color:#222}}table{{border-collapse:collapse;width:100%}}\
         th,td{{text-align:left;vertical-align:top;padding:.3em .8em .3em 0;\
         border-bottom:1px solid #ddd}}code{{font-size:13px;word-break:break-all}}\
         .n{{text-align:right}}.bad{{color:#a00}}nav a{{margin-right:1em}}</style></head>\n<body>\
         <nav><a href=\"/debug/pprof/\">rbprof</a><a href=\"/targets\">targets</a>\
         <a href=\"/profiles\">profiles</a><a href=\"/flamegraph\">flame graph</a>\
         <a href=\"/metrics\">metrics</a><a href=\"/healthz\">health</a></nav>\n\
         <h1>{title}</h1>\n{body}</body></html>\n"
    )
}

/// What there is.
pub(super) fn index(default_seconds: u64, max: Duration) -> String {
    let max = max.as_secs();
    page(
        "Profiles of Ruby",
        &format!(
            "<table>\n\
             <tr><td><a href=\"/debug/pprof/profile\">/debug/pprof/profile</a><td>A fresh profile \
             of {default_seconds} seconds, for <code>go tool pprof</code> and the like. \
             <code>seconds=N</code>: up to {max}; <code>pid=P</code> or <code>service=S</code>: \
             of these processes only.\n\
             <tr><td><a href=\"/flamegraph\">/flamegraph</a><td>A flame graph of the recent \
             profiles; with <code>seconds=N</code> a fresh one; <code>pid=P</code> or \
             <code>service=S</code> as above; <code>id=N</code>: of one recent profile.\n\
             <tr><td><a href=\"/profiles\">/profiles</a><td>The recent profiles.\n\
             <tr><td><a href=\"/targets\">/targets</a><td>Which processes are profiled, how their \
             Ruby was found, what is missing. <code>format=json</code> for programs.\n\
             <tr><td><a href=\"/metrics\">/metrics</a><td>What the agent counts.\n\
             <tr><td><a href=\"/healthz\">/healthz</a><td>Whether all is well.\n</table>\n"
        ),
    )
}

/// The recent profiles, newest first.
pub(super) fn profiles(recent: &[Recent]) -> String {
    if recent.is_empty() {
        return page("Recent profiles", "<p>There is none yet.</p>\n");
    }
    let mut rows = String::new();
    for Recent { id, batch } in recent.iter().rev() {
        let pid = batch
            .process
            .as_ref()
            .map_or_else(|| "all".to_owned(), |process| process.pid.to_string());
        push(
            &mut rows,
            format_args!(
                "<tr><td>{}<td class=\"n\">{:.1} s<td>{}<td>{pid}<td class=\"n\">{}\
                 <td><a href=\"/flamegraph?id={id}\">flame graph</a> \
                 <a href=\"/profiles?id={id}\">pprof</a>\n",
                time(batch.from),
                lasted(batch.from, batch.until).as_secs_f64(),
                escaped(&batch.service),
                batch.profile.total(),
            ),
        );
    }
    page(
        "Recent profiles",
        &format!(
            "<table>\n<tr><th>from (UTC)<th class=\"n\">lasts<th>service<th>process\
             <th class=\"n\">samples<th>\n{rows}</table>\n"
        ),
    )
}

/// The recent profiles for programs.
pub(super) fn profiles_json(recent: &[Recent]) -> String {
    #[derive(Serialize)]
    struct Entry<'a> {
        id: u64,
        service: &'a str,
        pid: Option<u32>,
        from_unix: f64,
        until_unix: f64,
        samples: u64,
    }
    json(
        &recent
            .iter()
            .map(|Recent { id, batch }| Entry {
                id: *id,
                service: &batch.service,
                pid: batch.process.as_ref().map(|process| process.pid),
                from_unix: unix(batch.from),
                until_unix: unix(batch.until),
                samples: batch.profile.total(),
            })
            .collect::<Vec<_>>(),
    )
}

/// The processes.
pub(super) fn targets(targets: &[Target]) -> String {
    let mut rows = String::new();
    for target in targets {
        let identity = &target.identity;
        let query = format!("pid={}", identity.pid);
        let by_service = format!("service={}", encoded(&identity.service));
        let place: Vec<_> = [
            ("unit", &identity.unit),
            ("container", &identity.container),
            ("pod", &identity.pod),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some(format!("{name} {}", escaped(value.as_deref()?))))
        .collect();
        let roots: Vec<_> = (target.roots.iter())
            .map(|(name, how)| format!("{}: {}", escaped(name), escaped(how)))
            .collect();
        let missing: Vec<_> = target.missing.iter().map(|text| escaped(text)).collect();
        let links = if target.is_profiled {
            format!("<a href=\"/flamegraph?{query}\">flame graph</a>")
        } else {
            "not profiled".to_owned()
        };
        push(
            &mut rows,
            format_args!(
                "<tr><td class=\"n\">{}<td><a href=\"/flamegraph?{by_service}\">{}</a>\
                 <td><code>{}</code><br>{}<td>{}<td class=\"n\">{}<td>{}\
                 <td class=\"bad\">{}<td>{links}\n",
                identity.pid,
                escaped(&identity.service),
                escaped(identity.script.as_ref().unwrap_or(&identity.command)),
                place.join("<br>"),
                escaped(&identity.ruby),
                target.samples,
                roots.join("<br>"),
                missing.join("<br>"),
            ),
        );
    }
    page(
        "Targets",
        &format!(
            "<table>\n<tr><th class=\"n\">process<th>service<th>program<th>Ruby\
             <th class=\"n\">samples<th>how it was found<th>missing<th>\n{rows}</table>\n"
        ),
    )
}

/// The processes for programs.
pub(super) fn targets_json(targets: &[Target]) -> String {
    #[derive(Serialize)]
    struct Root<'a> {
        name: &'a str,
        found_by: &'a str,
    }
    #[derive(Serialize)]
    struct Entry<'a> {
        pid: u32,
        started_ticks: u64,
        service: &'a str,
        command: &'a str,
        script: Option<&'a str>,
        cgroup: Option<&'a str>,
        container: Option<&'a str>,
        unit: Option<&'a str>,
        pod: Option<&'a str>,
        ruby: &'a str,
        profiled: bool,
        since_unix: f64,
        samples: u64,
        roots: Vec<Root<'a>>,
        missing: &'a [String],
    }
    json(
        &targets
            .iter()
            .map(|target| {
                let identity = &*target.identity;
                Entry {
                    pid: identity.pid,
                    started_ticks: identity.started,
                    service: &identity.service,
                    command: &identity.command,
                    script: identity.script.as_deref(),
                    cgroup: identity.cgroup.as_deref(),
                    container: identity.container.as_deref(),
                    unit: identity.unit.as_deref(),
                    pod: identity.pod.as_deref(),
                    ruby: &identity.ruby,
                    profiled: target.is_profiled,
                    since_unix: unix(target.since),
                    samples: target.samples,
                    roots: target
                        .roots
                        .iter()
                        .map(|(name, found_by)| Root { name, found_by })
                        .collect(),
                    missing: &target.missing,
                }
            })
            .collect::<Vec<_>>(),
    )
}

fn json(entries: &[impl Serialize]) -> String {
    let mut text = serde_json::to_string_pretty(entries).unwrap_or_default();
    text.push('\n');
    text
}

/// Seconds since the Unix epoch.
fn unix(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}

/// UTC, to the second.
fn time(time: SystemTime) -> String {
    let mut text = String::new();
    let time = humantime::format_rfc3339_seconds(time.max(UNIX_EPOCH));
    // Years of five digits have no such form.
    if write!(text, "{time}").is_err() {
        return "?".to_owned();
    }
    text.trim_end_matches('Z').replace('T', " ")
}

fn lasted(from: SystemTime, until: SystemTime) -> Duration {
    until.duration_since(from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_no_markup() {
        assert_eq!(escaped("<a b='\"&'>"), "&lt;a b=&#39;&quot;&amp;&#39;&gt;");
        assert_eq!(encoded("a b&c/é"), "a%20b%26c%2F%C3%A9");
        assert_eq!(time(UNIX_EPOCH), "1970-01-01 00:00:00");
    }
}

//! The example file, made of the keys.

use std::fmt::Write as _;

use super::keys;
use super::keys::Reload;

/// Columns of a line of comment.
const WIDTH: usize = 78;

/// A file in which every key is documented, and commented out with its default.
#[must_use]
pub fn example() -> String {
    let mut text = String::from(
        "# Configuration of `rbprof agent`, in TOML: /etc/rbprof/agent.toml, or --config FILE.\n\
         # Every key with its default. `rbprof agent --check-config` shows what is in effect.\n\
         #\n\
         # Each key is also a flag and an environment variable: http.listen is --http-listen\n\
         # and RBPROF_HTTP_LISTEN. Flags come before variables, variables before this file. A\n\
         # flag for a list is given once for each item; a variable has one item, or a list as\n\
         # it would be written here. An empty variable counts as none.\n",
    );
    let mut table = "";
    for key in keys::all() {
        let (of, name) = key.path.rsplit_once('.').unwrap_or(("", key.path));
        if of != table {
            // Writing to a string does not fail.
            let _ = write!(text, "\n[{of}]\n");
            table = of;
        }
        let effect = match key.reload {
            Reload::Live => "takes effect on reload",
            Reload::Restart => "needs a restart",
        };
        text.push('\n');
        let about = format!("{} Allowed: {}. A change {effect}.", key.help, key.allowed);
        for line in wrapped(&about) {
            let _ = writeln!(text, "# {line}");
        }
        let value = match key.default {
            "" => sample(key.path),
            default => default,
        };
        let _ = writeln!(text, "#{name} = {value}");
    }
    text
}

/// A value for keys that have no default.
fn sample(path: &str) -> &'static str {
    match path {
        "files.directory" => "\"/var/lib/rbprof/profiles\"",
        "pyroscope.url" => "\"http://localhost:4040\"",
        "otlp.url" => "\"http://localhost:4318\"",
        _ if path.ends_with("spill_directory") => "\"/var/lib/rbprof/spill\"",
        _ if path.ends_with("_file") => "\"/etc/rbprof/...\"",
        _ => "\"...\"",
    }
}

/// Words in lines of at most [`WIDTH`] columns, as far as words allow.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_ascii_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

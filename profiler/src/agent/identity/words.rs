//! The command line of a Ruby: its words or its title, and the main script.

use std::borrow::Cow;

use super::MAX_COMMAND_LINE;
use super::read_start;
use crate::memory::PinnedProcess;

/// Options of `ruby` that take the next word if nothing follows in their own
/// (`proc_options` of Ruby's `ruby.c`).
const SHORT_WITH_VALUE: &str = "CEIXer";
/// Long options that take the next word, unless there is a `=`.
const LONG_WITH_VALUE: [&str; 9] = [
    "backtrace-limit",
    "crash-report",
    "disable",
    "dump",
    "enable",
    "encoding",
    "external-encoding",
    "internal-encoding",
    "parser",
];

/// A command line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CommandLine {
    /// The words that the program was started with; maybe none.
    Words(Vec<String>),
    /// What the process calls itself (`Process.setproctitle`, `$0 =`).
    Title(String),
}

impl CommandLine {
    /// That of a process; a thread's name in brackets where it has none.
    pub(super) fn of(process: &PinnedProcess) -> Self {
        let bytes = read_start(process, "cmdline", MAX_COMMAND_LINE).unwrap_or_default();
        match Self::parse(&bytes) {
            Self::Words(words) if words.is_empty() => {
                let name = process.read("comm").unwrap_or_default();
                let name = String::from_utf8_lossy(name.trim_ascii_end()).into_owned();
                Self::Words(if name.is_empty() {
                    Vec::new()
                } else {
                    vec![format!("[{name}]")]
                })
            }
            line => line,
        }
    }

    /// Reads `/proc/PID/cmdline`: words with a NUL after each. A title is one
    /// word; Ruby fills the room that the words had with further NULs.
    fn parse(bytes: &[u8]) -> Self {
        let mut words: Vec<String> = bytes
            .strip_suffix(b"\0")
            .unwrap_or(bytes)
            .split(|&byte| byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        let is_padded = words.len() > 1 && words.iter().skip(1).all(String::is_empty);
        let has_one = words.len() == 1 || is_padded;
        match words.first() {
            // A program's path seldom has a space in it.
            Some(first) if has_one && !first.is_empty() && (is_padded || first.contains(' ')) => {
                Self::Title(words.swap_remove(0).trim().to_owned())
            }
            Some(first) if has_one && first.is_empty() => Self::Words(Vec::new()),
            _ => Self::Words(words),
        }
    }

    /// All of it, with single spaces.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Title(title) => title.clone(),
            Self::Words(words) => {
                let words: Vec<&str> = words
                    .iter()
                    .flat_map(|word| word.split_ascii_whitespace())
                    .collect();
                words.join(" ")
            }
        }
    }

    /// The main script, or the title.
    pub(super) fn script(&self) -> Option<&str> {
        match self {
            Self::Title(title) => Some(title),
            Self::Words(words) => {
                let (program, arguments) = words.split_first()?;
                is_ruby(program).then(|| script(arguments)).flatten()
            }
        }
    }

    /// A short name that all processes of a service have in common: without
    /// paths, numbers of workers, and what a server is doing at the moment.
    pub(super) fn short_name(&self) -> String {
        let name = match self {
            Self::Title(title) => server(title),
            Self::Words(words) => {
                let program = self.script().or(words.first().map(String::as_str));
                Cow::Borrowed(base_name(program.unwrap_or_default()))
            }
        };
        name.strip_suffix(".rb").unwrap_or(&name).to_owned()
    }
}

/// Whether a program's name is that of the interpreter: `ruby`, `ruby3.3`,
/// `ruby2.7`, `ruby-mri`.
fn is_ruby(program: &str) -> bool {
    base_name(program).starts_with("ruby")
}

/// The last part of a path. A login shell's `-` in front is not part of it.
fn base_name(path: &str) -> &str {
    path.trim_end_matches('/')
        .rsplit('/')
        .next()
        .unwrap_or_default()
}

/// The main script in the arguments of `ruby`.
fn script(arguments: &[String]) -> Option<&str> {
    let mut rest = arguments.iter().map(String::as_str);
    let mut has_code = false;
    while let Some(word) = rest.next() {
        let found = match word.strip_prefix('-') {
            // Standard input.
            Some("") => return None,
            Some("-") => rest.next(),
            Some(option) => {
                if let Some(name) = option.strip_prefix('-') {
                    // Ruby takes `_` for `-` in names.
                    let name = name.replace('_', "-");
                    if LONG_WITH_VALUE.contains(&name.as_str()) {
                        rest.next();
                    }
                } else {
                    let short = short_options(option);
                    has_code |= short.has_code;
                    if short.wants_value {
                        rest.next();
                    }
                }
                continue;
            }
            None => Some(word),
        };
        return found.filter(|_| !has_code);
    }
    None
}

/// What a word of one-letter options means for the words after it.
#[derive(Default)]
struct Short {
    /// The next word is the value of the last option.
    wants_value: bool,
    /// There is code on the command line, so what comes after the options are
    /// the arguments of that.
    has_code: bool,
}

fn short_options(options: &str) -> Short {
    let mut short = Short::default();
    let mut letters = options.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            'e' => short.has_code = true,
            // The rest is the value, if there is any.
            'F' | 'i' | 'x' => return short,
            // `-W:category` has the rest, `-W2` a digit.
            'W' if letters.peek() == Some(&':') => return short,
            'W' | '0' | 'T' => while letters.next_if(char::is_ascii_digit).is_some() {},
            'K' => {
                letters.next();
            }
            _ => {}
        }
        if SHORT_WITH_VALUE.contains(letter) {
            short.wants_value = letters.peek().is_none();
            return short;
        }
    }
    short
}

/// The server that gave a process its title, and its application where the
/// title has a name for that.
fn server(title: &str) -> Cow<'_, str> {
    // Sidekiq 7: `sidekiq 7.2.0 shop [0 of 5 busy]`; with neither tag nor
    // directory there is no third word.
    if let Some(rest) = title.strip_prefix("sidekiq ") {
        let tag = rest.split_ascii_whitespace().nth(1);
        return with_application("sidekiq", tag.filter(|tag| !tag.starts_with('[')));
    }
    // Puma: `puma 6.4.2 (tcp://0.0.0.0:3000) [shop]`,
    // `puma: cluster worker 0: 12 [shop]`.
    if let Some(rest) = title.strip_prefix("puma")
        && rest.starts_with([' ', ':'])
    {
        let tag = rest
            .trim_end()
            .strip_suffix(']')
            .and_then(|rest| rest.rsplit_once('['))
            .map(|(_, tag)| tag);
        return with_application("puma", tag);
    }
    // Passenger: `Passenger RubyApp: /srv/shop (production)`.
    if let Some(rest) = title.strip_prefix("Passenger ") {
        let path = rest
            .split_once(": ")
            .map(|(_, path)| path.rsplit_once(" (").map_or(path, |(path, _)| path));
        return with_application("passenger", path.map(base_name));
    }
    // Spring: `spring app    | shop | started 2 secs ago | development mode`.
    if title.starts_with("spring ") {
        let tag = title.split('|').nth(1).map(str::trim);
        return with_application("spring", tag);
    }
    // `unicorn worker[0] -c unicorn.rb`, `resque-2.6.0: Waiting for *`,
    // `solid-queue-worker(1.0.0): waiting`, `/usr/bin/thin start`.
    let word = title.split_ascii_whitespace().next().unwrap_or_default();
    let word = base_name(word);
    let word = word.split([':', '(', '[']).next().unwrap_or(word);
    let bare = word.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    match bare.strip_suffix('-') {
        Some(name) if bare.len() < word.len() && !name.is_empty() => Cow::Borrowed(name),
        _ => Cow::Borrowed(word),
    }
}

fn with_application<'a>(server: &'static str, application: Option<&str>) -> Cow<'a, str> {
    match application.map(str::trim) {
        None | Some("") => Cow::Borrowed(server),
        Some(application) => Cow::Owned(format!("{server}-{application}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> CommandLine {
        let mut bytes = line.join("\0").into_bytes();
        bytes.push(0);
        CommandLine::parse(&bytes)
    }

    fn title(title: &str) -> CommandLine {
        CommandLine::parse(format!("{title}\0\0\0\0").as_bytes())
    }

    #[test]
    fn the_script_comes_after_the_options() {
        for (line, script) in [
            (&["ruby", "app.rb"][..], Some("app.rb")),
            (
                &["/usr/bin/ruby3.3", "-w", "bin/rails", "server"],
                Some("bin/rails"),
            ),
            (
                &["ruby", "-I", "lib", "-Itest", "-rset", "-r", "json", "t.rb"],
                Some("t.rb"),
            ),
            (&["ruby", "-S", "rails", "server"], Some("rails")),
            (&["ruby", "-wS", "rake"], Some("rake")),
            (
                &["ruby", "-C", "/srv/shop", "-E", "UTF-8", "app.rb"],
                Some("app.rb"),
            ),
            (
                &["ruby", "-C/srv/shop", "-EUTF-8", "app.rb"],
                Some("app.rb"),
            ),
            (
                &["ruby", "--jit", "--yjit-call-threshold=5", "app.rb"],
                Some("app.rb"),
            ),
            (
                &[
                    "ruby",
                    "--disable",
                    "gems",
                    "--disable=did_you_mean",
                    "app.rb",
                ],
                Some("app.rb"),
            ),
            (
                &["ruby", "--disable-gems", "--encoding", "UTF-8", "app.rb"],
                Some("app.rb"),
            ),
            (
                &["ruby", "--external_encoding", "UTF-8", "app.rb"],
                Some("app.rb"),
            ),
            (
                &["ruby", "-W0", "-W:no-deprecated", "-W", "app.rb"],
                Some("app.rb"),
            ),
            (&["ruby", "-ne", "puts", "file"], None),
            (&["ruby", "-e", "puts 1", "--", "file"], None),
            (&["ruby", "-eputs", "file"], None),
            (&["ruby", "-rjson", "-e", "x"], None),
            (&["ruby", "-Ku", "-x/srv", "app.rb"], Some("app.rb")),
            (
                &["ruby", "-i.bak", "-F:", "-0777", "app.rb"],
                Some("app.rb"),
            ),
            (&["ruby", "-wIlib", "-wI", "lib", "app.rb"], Some("app.rb")),
            (&["ruby", "--", "-app.rb", "x"], Some("-app.rb")),
            (&["ruby", "-", "x"], None),
            (&["ruby", "-I"], None),
            (&["ruby"], None),
            // A program with Ruby in it has no script that we know of.
            (&["vim", "app.rb"], None),
        ] {
            assert_eq!(words(line).script(), script, "{line:?}");
        }
    }

    #[test]
    fn a_title_is_told_from_words() {
        assert_eq!(title("puma"), CommandLine::Title("puma".to_owned()));
        // As long as the words were.
        assert_eq!(
            words(&["puma: cluster worker 0: 12 [shop]"]),
            CommandLine::Title("puma: cluster worker 0: 12 [shop]".to_owned())
        );
        assert_eq!(words(&["irb"]), CommandLine::Words(vec!["irb".to_owned()]));
        assert_eq!(words(&["ruby", "", "x"]).text(), "ruby x");
        for empty in [&b""[..], b"\0", b"\0\0\0"] {
            assert_eq!(CommandLine::parse(empty), CommandLine::Words(Vec::new()));
        }
        assert_eq!(
            CommandLine::parse(b"a\xff\0b\nc  d\0").text(),
            "a\u{fffd} b c d"
        );
    }

    #[test]
    fn workers_of_a_server_have_one_name() {
        for (text, name) in [
            ("puma 6.4.2 (tcp://0.0.0.0:3000) [shop]", "puma-shop"),
            ("puma: cluster worker 0: 12 [shop]", "puma-shop"),
            ("puma: cluster worker 11: 4711 [shop]", "puma-shop"),
            ("puma 5.6.7 (unix:///run/x.sock)", "puma"),
            ("sidekiq 7.2.0 shop [0 of 5 busy]", "sidekiq-shop"),
            ("sidekiq 7.2.0 shop [5 of 5 busy] stopping", "sidekiq-shop"),
            ("sidekiq 6.5.1 [1 of 5 busy]", "sidekiq"),
            ("unicorn master -c config/unicorn.rb -D", "unicorn"),
            ("unicorn worker[3] -c config/unicorn.rb -D", "unicorn"),
            ("unicorn_rails worker[3] -D", "unicorn_rails"),
            ("resque-2.6.0: Waiting for default", "resque"),
            ("resque-2.6.0: Forked 4711 at 1700000000", "resque"),
            (
                "Passenger RubyApp: /srv/shop (production)",
                "passenger-shop",
            ),
            (
                "Passenger AppPreloader: /srv/shop (forking...)",
                "passenger-shop",
            ),
            (
                "spring app    | shop | started 2 secs ago | development mode",
                "spring-shop",
            ),
            ("spring server | shop | started 2 secs ago", "spring-shop"),
            (
                "solid-queue-worker(1.0.0): waiting for jobs in *",
                "solid-queue-worker",
            ),
            ("pitchfork (gen:0) worker[1] - idle", "pitchfork"),
            ("delayed_job.0", "delayed_job.0"),
            ("/usr/local/bin/thin start -p 3000", "thin"),
            ("x-1", "x"),
            ("-1", "-1"),
            ("pumaclub shop", "pumaclub"),
            ("puma: ]", "puma"),
        ] {
            assert_eq!(title(text).short_name(), name, "{text}");
        }
    }

    #[test]
    fn a_command_has_the_name_of_its_script() {
        for (line, name) in [
            (&["ruby", "/srv/shop/app.rb", "-v"][..], "app"),
            (&["ruby", "bin/rails", "server"], "rails"),
            (&["/usr/bin/ruby", "-e", "loop {}"], "ruby"),
            (&["irb"], "irb"),
            (&["[ruby]"], "[ruby]"),
            (&[""], ""),
        ] {
            assert_eq!(words(line).short_name(), name, "{line:?}");
        }
    }
}

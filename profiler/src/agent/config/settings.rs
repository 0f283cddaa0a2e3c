//! Values and where they are from: flags before environment variables before
//! the file before defaults. What the values mean is [`Config`](super::Config)'s.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::path::Path;

use toml::Spanned;
use toml::Value;
use toml::de::DeTable;
use toml::de::DeValue;

use super::error::ConfigError;
use super::error::Origin;
use super::error::Problem;
use super::keys;
use super::keys::Form;
use super::keys::Key;
use super::keys::Reload;
use super::sinks;
use crate::output::plain;
use crate::targets::image::open_regular;

/// Longest file read, in bytes.
const MAX_FILE: u64 = 1 << 20;
/// Variables of this beginning are ours.
const VARIABLES: &str = "RBPROF_";
/// Variables that have a meaning without being a key.
const OTHER_VARIABLES: [&str; 1] = ["RBPROF_CONFIG"];

/// What is given besides the file.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Keys and what their flags say, in the order of the command line.
    pub flags: Vec<(&'static Key, Vec<String>)>,
    /// The environment.
    pub variables: Vec<(String, String)>,
}

impl Given {
    /// These flags, and this process's environment.
    #[must_use]
    pub fn with_environment(flags: Vec<(&'static Key, Vec<String>)>) -> Self {
        // What is not UTF-8 is not for us.
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with(VARIABLES))
            .collect();
        Self { flags, variables }
    }
}

/// A value and where it is from.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The value; `None` where there is no default either.
    pub value: Option<Value>,
    /// Where it is from.
    pub origin: Origin,
}

/// The value of each key.
#[derive(Clone, Debug)]
pub struct Settings {
    values: BTreeMap<&'static str, Setting>,
    /// What is strange, but no error.
    pub warnings: Vec<String>,
}

impl Settings {
    /// Puts together what is given. `file`: to be read as well.
    ///
    /// # Errors
    /// When the file cannot be read or is no TOML, when there is no such key, or
    /// a value is not of its key's [`Form`]. All of it is said at once.
    pub fn read(file: Option<&Path>, given: &Given) -> Result<Self, ConfigError> {
        let mut problems = Vec::new();
        let mut settings = Self {
            values: keys::all()
                .map(|key| {
                    let setting = Setting {
                        value: from_toml(key.default).ok(),
                        origin: Origin::Default,
                    };
                    (key.path, setting)
                })
                .collect(),
            warnings: Vec::new(),
        };
        if let Some(path) = file {
            match read_file(path) {
                Ok(text) => settings.take_file(path, &text, &mut problems),
                Err(what) => problems.push(Problem {
                    origin: None,
                    key: None,
                    what: format!("{}: {what}", path.display()),
                    allowed: None,
                }),
            }
        }
        settings.take_variables(&given.variables, &mut problems);
        for (key, texts) in &given.flags {
            let origin = Origin::Flag(key.flag());
            settings.take(key, of_texts(key, texts), origin, &mut problems);
        }
        if problems.is_empty() {
            Ok(settings)
        } else {
            Err(ConfigError { problems })
        }
    }

    fn take_variables(&mut self, variables: &[(String, String)], problems: &mut Vec<Problem>) {
        for (name, text) in variables {
            // An empty one is none: units and shells have no other way to say so.
            if text.is_empty() {
                continue;
            }
            match keys::all().find(|key| key.variable() == *name) {
                Some(key) => {
                    let value = of_variable(key, text);
                    self.take(key, value, Origin::Variable(name.clone()), problems);
                }
                None if name.starts_with(VARIABLES)
                    && !OTHER_VARIABLES.contains(&name.as_str()) =>
                {
                    self.warnings
                        .push(format!("the environment has {name}, which means nothing"));
                }
                None => {}
            }
        }
    }

    fn take_file(&mut self, path: &Path, text: &str, problems: &mut Vec<Problem>) {
        let origin = |offset: usize| Origin::File {
            path: path.to_owned(),
            line: line_of(text, offset),
        };
        match DeTable::parse(text) {
            Ok(table) => self.take_table(table.get_ref(), "", &origin, problems),
            Err(error) => problems.push(Problem {
                origin: Some(origin(error.span().map_or(0, |span| span.start))),
                key: None,
                what: error.message().to_owned(),
                allowed: None,
            }),
        }
    }

    /// Takes what is in a table whose name is `prefix`.
    fn take_table(
        &mut self,
        table: &DeTable<'_>,
        prefix: &str,
        origin: &dyn Fn(usize) -> Origin,
        problems: &mut Vec<Problem>,
    ) {
        for (name, value) in table {
            let path = if prefix.is_empty() {
                name.get_ref().clone().into_owned()
            } else {
                format!("{prefix}.{}", name.get_ref())
            };
            let at = origin(name.span().start);
            if let Some(key) = Key::of(&path) {
                let found = owned(value);
                let is_right = match (key.form, &found) {
                    (Form::Text | Form::Secret, Value::String(_))
                    | (Form::Number, Value::Integer(_) | Value::Float(_))
                    | (Form::Switch, Value::Boolean(_)) => true,
                    (Form::List, Value::Array(items)) => items.iter().all(Value::is_str),
                    (Form::Map, Value::Table(entries)) => entries.values().all(Value::is_str),
                    _ => false,
                };
                let wanted = || {
                    let form = match key.form {
                        Form::Text | Form::Secret => "a text in quotes",
                        Form::Number => "a number",
                        Form::Switch => "true or false, without quotes",
                        Form::List => "a list of texts: [\"...\", \"...\"]",
                        Form::Map => "a table of texts: { name = \"...\" }",
                    };
                    format!("this must be {form}")
                };
                let found = is_right.then_some(found).ok_or_else(wanted);
                self.take(key, found, at, problems);
            } else if let (Some(inner), true) = (value.get_ref().as_table(), is_table(&path)) {
                self.take_table(inner, &path, origin, problems);
            } else {
                problems.push(Problem {
                    origin: Some(at),
                    key: Some(plain(&path).into_owned()),
                    what: "there is no such key".to_owned(),
                    allowed: Some(names_in(prefix)),
                });
            }
        }
    }

    fn take(
        &mut self,
        key: &'static Key,
        value: Result<Value, String>,
        origin: Origin,
        problems: &mut Vec<Problem>,
    ) {
        match value {
            Ok(value) => {
                let value = Some(value);
                self.values.insert(key.path, Setting { value, origin });
            }
            Err(what) => problems.push(Problem {
                origin: Some(origin),
                key: Some(key.path.to_owned()),
                what,
                allowed: Some(key.allowed.to_owned()),
            }),
        }
    }

    /// The value of a key; `None` if nobody gave one and there is no default.
    #[must_use]
    pub fn value(&self, path: &str) -> Option<&Value> {
        self.values.get(path)?.value.as_ref()
    }

    /// The value of a key, if somebody gave one.
    pub(super) fn given(&self, path: &str) -> Option<&Value> {
        self.value(path)
            .filter(|_| *self.origin(path) != Origin::Default)
    }

    /// Where a value is from.
    #[must_use]
    pub fn origin(&self, path: &str) -> &Origin {
        self.values
            .get(path)
            .map_or(&Origin::Default, |setting| &setting.origin)
    }

    /// What was given in the tables of these names, as one TOML table, for parts
    /// that read their configuration with serde and know their own defaults.
    #[must_use]
    pub fn tables(&self, names: &[&str]) -> toml::Table {
        let mut all = toml::Table::new();
        for (path, setting) in &self.values {
            let mut parts = path.split('.');
            let is_wanted = parts.next().is_some_and(|name| names.contains(&name));
            if let (true, Some(value)) = (is_wanted, &setting.value)
                && setting.origin != Origin::Default
            {
                insert(&mut all, path, value.clone());
            }
        }
        all
    }

    /// The keys whose values differ from those of `new`, with when that takes
    /// effect.
    #[must_use]
    pub fn changes(&self, new: &Self) -> Vec<(&'static str, Reload)> {
        keys::all()
            .filter(|key| self.value(key.path) != new.value(key.path))
            .map(|key| (key.path, key.reload))
            .collect()
    }
}

impl fmt::Display for Settings {
    /// A line for each key that has a value, in the form of a file, with where
    /// the value is from.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for key in keys::all() {
            let Some(value) = self.value(key.path) else {
                continue;
            };
            // A sink that is not asked for has no settings in effect.
            let table = key.path.split('.').next().unwrap_or_default();
            if sinks::TABLES.contains(&table) && self.tables(&[table]).is_empty() {
                continue;
            }
            let line = match key.form {
                Form::Secret => format!("{} = (not shown)", key.path),
                _ => format!("{} = {}", key.path, shown(value)),
            };
            writeln!(
                f,
                "{line:<48} # {}",
                plain(&self.origin(key.path).to_string())
            )?;
        }
        Ok(())
    }
}

/// A value in one line of TOML.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(shown).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Table(table) if table.is_empty() => "{}".to_owned(),
        Value::Table(table) => {
            let entries: Vec<_> = table
                .iter()
                .map(|(name, value)| format!("{} = {}", quoted(name), shown(value)))
                .collect();
            format!("{{ {} }}", entries.join(", "))
        }
        // Whole numbers stay such that a reader takes them for fractions.
        Value::Float(number) => format!("{number:?}"),
        Value::Integer(number) => number.to_string(),
        Value::Boolean(is_on) => is_on.to_string(),
        Value::Datetime(time) => time.to_string(),
    }
}

/// A basic string of TOML.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c.is_control() => out.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

fn read_file(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    open_regular(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(format!("longer than {MAX_FILE} bytes"));
    }
    String::from_utf8(bytes).map_err(|_| "not UTF-8 text".to_owned())
}

/// The line that the byte at `offset` is in, from 1.
fn line_of(text: &str, offset: usize) -> usize {
    let before = text.as_bytes().iter().take(offset);
    1 + before.filter(|&&byte| byte == b'\n').count()
}

/// Whether a name is that of a table, and not a key's.
fn is_table(path: &str) -> bool {
    keys::all().any(|key| {
        key.path
            .strip_prefix(path)
            .is_some_and(|rest| rest.starts_with('.'))
    })
}

/// The names that may stand in a table.
fn names_in(prefix: &str) -> String {
    let mut names: Vec<&str> = keys::all()
        .filter_map(|key| {
            let rest = if prefix.is_empty() {
                key.path
            } else {
                key.path.strip_prefix(prefix)?.strip_prefix('.')?
            };
            rest.split('.').next()
        })
        .collect();
    names.dedup();
    names.join(", ")
}

/// A value that does not borrow from the file.
fn owned(value: &Spanned<DeValue<'_>>) -> Value {
    match value.get_ref() {
        DeValue::String(text) => Value::String(text.clone().into_owned()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or_else(
                |_| Value::String(number.as_str().to_owned()),
                Value::Integer,
            ),
        DeValue::Float(number) => number
            .as_str()
            .parse()
            .map_or_else(|_| Value::String(number.as_str().to_owned()), Value::Float),
        DeValue::Boolean(is_on) => Value::Boolean(*is_on),
        DeValue::Datetime(time) => Value::Datetime(*time),
        DeValue::Array(items) => Value::Array(items.iter().map(owned).collect()),
        DeValue::Table(table) => Value::Table(
            table
                .iter()
                .map(|(name, value)| (name.get_ref().clone().into_owned(), owned(value)))
                .collect(),
        ),
    }
}

/// A value written as TOML.
fn from_toml(text: &str) -> Result<Value, String> {
    let value = DeValue::parse(text).map_err(|error| error.message().to_owned())?;
    Ok(owned(&value))
}

/// The value of a variable: lists and maps in TOML's form, or a list of one.
fn of_variable(key: &Key, text: &str) -> Result<Value, String> {
    let is_toml = match key.form {
        Form::List => text.trim_start().starts_with('['),
        Form::Map => text.trim_start().starts_with('{'),
        _ => false,
    };
    if !is_toml {
        return of_texts(key, &[text.to_owned()]);
    }
    let value = from_toml(text.trim())?;
    let is_right = match &value {
        Value::Array(items) => items.iter().all(Value::is_str),
        Value::Table(entries) => entries.values().all(Value::is_str),
        _ => false,
    };
    is_right
        .then_some(value)
        .ok_or_else(|| "these must be texts".to_owned())
}

/// The value that was given in so many words. Of a key with one value the last
/// one counts.
fn of_texts(key: &Key, texts: &[String]) -> Result<Value, String> {
    let last = texts.last().map_or("", String::as_str);
    match key.form {
        Form::Text | Form::Secret => Ok(Value::String(last.to_owned())),
        Form::Number => {
            let whole = last.parse().map(Value::Integer);
            whole
                .or_else(|_| last.parse().map(Value::Float))
                .map_err(|_| format!("{} is not a number", quoted(last)))
        }
        Form::Switch => last
            .parse()
            .map(Value::Boolean)
            .map_err(|_| format!("{} is neither true nor false", quoted(last))),
        // `--include ""` is how to have none, whatever the file says.
        Form::List => Ok(Value::Array(
            texts
                .iter()
                .filter(|text| !text.is_empty())
                .map(|text| Value::String(text.clone()))
                .collect(),
        )),
        Form::Map => texts
            .iter()
            .filter(|text| !text.is_empty())
            .map(|text| {
                let (name, value) = text
                    .split_once('=')
                    .ok_or_else(|| format!("{} is not NAME=TEXT", quoted(text)))?;
                Ok((name.to_owned(), Value::String(value.to_owned())))
            })
            .collect::<Result<toml::Table, String>>()
            .map(Value::Table),
    }
}

/// Puts a value where its path leads, making tables on the way.
pub(super) fn insert(table: &mut toml::Table, path: &str, value: Value) {
    match path.split_once('.') {
        None => {
            table.insert(path.to_owned(), value);
        }
        Some((name, rest)) => {
            let inner = table
                .entry(name)
                .or_insert_with(|| Value::Table(toml::Table::new()));
            if let Value::Table(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}

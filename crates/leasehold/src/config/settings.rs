//! The layers of a configuration, and typed access to their values.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::error::{ConfigError, Origin, Problem};
use super::value::{Setting, Written};
use super::yaml::{self, At, Kind, Node};

/// The prefix of all environment variables.
const PREFIX: &str = "LEASEHOLD_";

/// The values of files, the environment and the program, before they are parsed.
///
/// Each part of the system reads its own keys. Keys that no part has read are unknown. Problems are collected, so that all
/// are reported at once.
///
/// ```
/// use std::time::Duration;
/// use leasehold::config::{Config, Settings};
///
/// let mut settings = Settings::new()
///     .yaml("locks.yaml", "ttl: 20s\nserver:\n  page_size: 50\n")
///     .variables([("LEASEHOLD_NAMESPACE", "billing")])
///     .set("ttl", "5s");
/// let config = Config::read(&mut settings);
/// let page_size = settings.get("server.page_size", 100_u32);    // a key of another part
/// let shown = settings.finish()?;
///
/// assert_eq!((config.ttl.duration(), page_size), (Duration::from_secs(5), 50));
/// let ttl = shown.iter().find(|shown| shown.key == "ttl").expect("read above");
/// assert_eq!((ttl.value.as_str(), ttl.origin.to_string().as_str()), ("5s", "explicit"));
/// # Ok::<(), leasehold::config::ConfigError>(())
/// ```
#[derive(Debug, Default)]
pub struct Settings {
    /// The lines of each file, for snippets.
    files: BTreeMap<String, Vec<String>>,
    /// The values of all files; later files override earlier ones.
    in_files: BTreeMap<String, FileEntry>,
    environment: BTreeMap<String, Result<String, ()>>,
    /// The second variable of a key.
    second: BTreeMap<String, &'static str>,
    explicit: BTreeMap<String, String>,
    /// Every key that was read.
    known: BTreeSet<String>,
    shown: Vec<Shown>,
    problems: Vec<Problem>,
}

/// An entry of a file, with the places of its key and its value.
#[derive(Debug)]
struct FileEntry {
    key: Origin,
    value: Origin,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Nothing,
    Value(Written),
    Section,
}

/// A key with its effective value and its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The key with its sections, for example `gpu_lock.heartbeat.interval`.
    pub key: String,
    /// The effective value, without secrets.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
}

impl Settings {
    /// Creates settings without layers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates the layers of a program: a file (by default the one that `LEASEHOLD_CONFIG` names, if any), then the environment.
    pub fn of_this_process(file: Option<&Path>) -> Self {
        let settings = Self::new().environment();
        match file.map(Path::to_owned).or_else(file_of_the_environment) {
            Some(file) => settings.file(file),
            None => settings,
        }
    }

    /// Adds a YAML file. If it cannot be read, [`finish`](Self::finish) returns the error.
    pub fn file(mut self, path: impl AsRef<Path>) -> Self {
        let path = path.as_ref();
        let name = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => self.yaml(&name, &text),
            Err(error) => {
                let text = format!("cannot be read: {error}");
                self.problems.push(Problem { origin: Origin::WholeFile(name), text, snippet: None });
                self
            }
        }
    }

    /// Adds YAML from a text; `name` is its name in problems.
    pub fn yaml(mut self, name: &str, text: &str) -> Self {
        self.files.insert(name.to_owned(), text.lines().map(str::to_owned).collect());
        match yaml::parse(text) {
            Ok(Node { kind: Kind::Nothing, .. }) => {}
            Ok(Node { kind: Kind::Map(entries), .. }) => self.add_section(name, "", entries),
            Ok(node) => {
                self.refuse_at(Origin::file(name, node.at), "a configuration consists of `key: value` lines".into());
            }
            Err(broken) => {
                let origin = match broken.at {
                    Some(at) => Origin::file(name, at),
                    None => Origin::WholeFile(name.to_owned()),
                };
                self.refuse_at(origin, broken.problem);
            }
        }
        self
    }

    /// Adds the environment of this process. A variable is `LEASEHOLD_` and the key in capitals, with sections joined by `_`
    /// (`LEASEHOLD_GPU_LOCK_HEARTBEAT_INTERVAL`). Empty variables are ignored.
    pub fn environment(mut self) -> Self {
        for (variable, value) in std::env::vars_os().filter(|(_, value)| !value.is_empty()) {
            if let Some(variable) = variable.to_str().filter(|name| name.starts_with(PREFIX)) {
                self.environment.insert(variable.to_owned(), value.into_string().map_err(|_| ()));
            }
        }
        self
    }

    /// Adds variables as if they were in the environment.
    pub fn variables<'a>(mut self, variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        for (variable, value) in variables {
            self.environment.insert(variable.to_owned(), Ok(value.to_owned()));
        }
        self
    }

    /// Sets an explicit value, such as a flag of the command line. It overrides every other layer.
    pub fn set(mut self, key: &str, value: impl Into<String>) -> Self {
        self.explicit.insert(key.to_owned(), value.into());
        self
    }

    /// Adds a second variable for a key. The key's own variable overrides it.
    pub fn also(&mut self, key: &str, variable: &'static str) {
        self.second.insert(key.to_owned(), variable);
    }

    /// Returns the value of a key from the highest layer that has it, or the default. [`finish`](Self::finish) returns problems
    /// with it.
    pub fn get<T: Setting>(&mut self, key: &str, default: T) -> T {
        self.known.insert(key.to_owned());
        let mut found = (default, Origin::Default);
        // Every layer is read, the lowest first, because an invalid value is a problem even if a higher layer overrides it.
        for (origin, written) in self.layers(key) {
            match written.and_then(|written| T::read(&written)) {
                Ok(value) => found = (value, origin),
                Err(problem) => self.refuse_at(origin, format!("{key}: {problem}")),
            }
        }
        let (value, origin) = found;
        self.shown.push(Shown { key: key.to_owned(), value: value.show(), origin });
        value
    }

    /// Rejects the effective value of a key, for checks that involve several keys.
    pub fn refuse(&mut self, key: &str, problem: &str) {
        self.refuse_with(key, key, problem);
    }

    /// Rejects the effective value of a key because of another key. If the key has its default, the place of the other key is
    /// reported.
    pub fn refuse_with(&mut self, key: &str, other: &str, problem: &str) {
        let origin = |key: &str| {
            let shown = self.shown.iter().rev().find(|shown| shown.key == key);
            shown.map(|shown| shown.origin.clone()).filter(|origin| *origin != Origin::Default)
        };
        let origin = origin(key).or_else(|| origin(other)).unwrap_or(Origin::Default);
        self.refuse_at(origin, format!("{key}: {problem}"));
    }

    /// Ignores a section of the files, which another program reads.
    pub fn leave(&mut self, section: &str) {
        let inside = format!("{section}.");
        self.in_files.retain(|key, _| key != section && !key.starts_with(&inside));
    }

    /// Returns every key that was read, with its value and origin.
    ///
    /// # Errors
    /// All problems: invalid values and unknown keys.
    pub fn finish(mut self) -> Result<Vec<Shown>, ConfigError> {
        self.refuse_unknown();
        if self.problems.is_empty() { Ok(self.shown) } else { Err(ConfigError::new(self.problems)) }
    }

    /// Returns the values of a key in all layers, the lowest first.
    fn layers(&self, key: &str) -> Vec<(Origin, Result<Written, String>)> {
        let mut layers = Vec::new();
        if let Some(entry) = self.in_files.get(key) {
            let (origin, written) = match &entry.content {
                Content::Value(written) => (&entry.value, Ok(written.clone())),
                Content::Nothing => (&entry.key, Err("has no value".to_owned())),
                Content::Section => (&entry.key, Err("is one value, not a section".to_owned())),
            };
            layers.push((origin.clone(), written));
        }
        let second = self.second.get(key).map(ToString::to_string);
        for variable in second.into_iter().chain([variable(key)]) {
            if let Some(value) = self.environment.get(&variable) {
                let written = value.clone().map(Written::Text).map_err(|()| "is not UTF-8".to_owned());
                layers.push((Origin::Environment(variable), written));
            }
        }
        if let Some(value) = self.explicit.get(key) {
            layers.push((Origin::Explicit, Ok(Written::Text(value.clone()))));
        }
        layers
    }

    /// Adds the entries of a section.
    fn add_section(&mut self, file: &str, section: &str, entries: Vec<(String, At, Node)>) {
        for (name, at, node) in entries {
            let key = if section.is_empty() { name } else { format!("{section}.{name}") };
            let content = match node.kind {
                Kind::Nothing => Content::Nothing,
                Kind::Text(text) => Content::Value(Written::Text(text)),
                Kind::List(items) => match texts(items) {
                    Ok(texts) => Content::Value(Written::List(texts)),
                    Err(at) => {
                        let problem = format!("{key}: a list holds single values");
                        self.refuse_at(Origin::file(file, at), problem);
                        continue;
                    }
                },
                Kind::Map(entries) => {
                    self.add_section(file, &key, entries);
                    Content::Section
                }
            };
            let entry = FileEntry { key: Origin::file(file, at), value: Origin::file(file, node.at), content };
            self.in_files.insert(key, entry);
        }
    }

    fn refuse_unknown(&mut self) {
        let is_section = |key: &str| {
            let inside = format!("{key}.");
            self.known.iter().any(|known| known.starts_with(&inside))
        };
        let mut unknown = Vec::new();
        for (key, entry) in &self.in_files {
            // Only the unknown section itself is reported, not its keys.
            let inside_unknown = key.rsplit_once('.').is_some_and(|(section, _)| !is_section(section));
            if self.known.contains(key) || inside_unknown {
                continue;
            }
            match (&entry.content, is_section(key)) {
                (Content::Section | Content::Nothing, true) => {}
                (Content::Value(_), true) => {
                    unknown.push((entry.value.clone(), format!("{key} is a section, not one value")));
                }
                _ => unknown.push((entry.key.clone(), format!("{key} is not known{}", self.suggestion(key)))),
            }
        }
        // Other programs also use variables that begin with LEASEHOLD_, but not with the name of a section.
        let sections =
            self.known.iter().filter_map(|key| key.split_once('.')).map(|(section, _)| variable(section) + "_");
        let sections: BTreeSet<String> = sections.collect();
        let names: BTreeSet<String> = self.known.iter().map(|key| variable(key)).collect();
        for name in self.environment.keys() {
            if !names.contains(name) && sections.iter().any(|section| name.starts_with(section)) {
                let nearest = nearest(name, names.iter().map(String::as_str));
                let hint = nearest.map_or_else(String::new, |near| format!("; did you mean {near}?"));
                unknown.push((Origin::Environment(name.clone()), format!("no setting has this name{hint}")));
            }
        }
        for key in self.explicit.keys().filter(|key| !self.known.contains(*key)) {
            unknown.push((Origin::Explicit, format!("{key} is not known{}", self.suggestion(key))));
        }
        // In the order of the file.
        unknown.sort_by_key(|(origin, _)| match origin {
            Origin::File { line, column, .. } => (*line, *column),
            _ => (usize::MAX, 0),
        });
        for (origin, problem) in unknown {
            self.refuse_at(origin, problem);
        }
    }

    fn suggestion(&self, key: &str) -> String {
        let sections = self.known.iter().filter_map(|known| known.rsplit_once('.')).map(|(section, _)| section);
        let candidates = self.known.iter().map(String::as_str).chain(sections);
        nearest(key, candidates).map_or_else(String::new, |near| format!("; did you mean {near}?"))
    }

    fn refuse_at(&mut self, origin: Origin, text: String) {
        let snippet = match &origin {
            Origin::File { file, line, .. } => self.files.get(file).and_then(|lines| lines.get(line - 1)),
            _ => None,
        };
        let snippet = snippet.map(|line| without_secrets(line));
        self.problems.push(Problem { origin, text, snippet });
    }
}

/// Returns the environment variable of a key.
pub fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "_").to_uppercase())
}

/// Returns the file that `LEASEHOLD_CONFIG` names.
pub fn file_of_the_environment() -> Option<PathBuf> {
    std::env::var_os(super::FILE_VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from)
}

/// Returns the texts of a list, or the place of an item that is not a text.
fn texts(items: Vec<Node>) -> Result<Vec<String>, At> {
    let text = |item: Node| match item.kind {
        Kind::Text(text) => Ok(text),
        _ => Err(item.at),
    };
    items.into_iter().map(text).collect()
}

/// Returns a line of a file without passwords of URLs and without the values of keys that sound secret.
fn without_secrets(line: &str) -> String {
    let lower = line.to_ascii_lowercase();
    if let Some(colon) = line.find(':')
        // `url`: the path of a webhook is often its secret.
        && ["password", "secret", "token", "api_key", "apikey", "url"].iter().any(|word| lower[..colon].contains(word))
    {
        return format!("{}: …", &line[..colon]);
    }
    match (line.find("://"), line.rfind('@')) {
        (Some(begin), Some(end)) if begin + 3 < end => format!("{}…{}", &line[..begin + 3], &line[end..]),
        _ => line.to_owned(),
    }
}

/// Returns the most similar candidate, if it is similar enough.
fn nearest<'a>(wrong: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |candidate: &&str| edits(wrong, candidate);
    let best = candidates.min_by_key(distance)?;
    (edits(wrong, best) <= 2 + wrong.len() / 10).then_some(best)
}

/// Computes the edit distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let change = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

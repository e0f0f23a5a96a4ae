//! Compares the names of the library's public API with a committed list.
//!
//! rustdoc's JSON, which the usual tools read, needs a nightly compiler. Instead this parses the formatted sources: an item
//! begins at the left margin, a method at one indentation.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::{files, read, root};

/// The largest number of names at the root of the crate: types, functions, macros and modules.
const ROOT_NAMES_MAX: usize = 25;
const LIST: &str = "crates/leasehold/public-api.txt";
/// Set by `cargo xtask api`, which writes the list instead of comparing it.
const WRITE: &str = "LEASEHOLD_API_WRITE";

#[test]
fn the_public_api_is_the_recorded_one() {
    let names = Api::read().names();
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    if std::env::var_os(WRITE).is_some() {
        fs::write(root().join(LIST), text).expect("written");
        return;
    }
    let recorded = read(LIST);
    let recorded: BTreeSet<&str> = recorded.lines().collect();
    let gone: Vec<_> = recorded.iter().filter(|name| !names.contains(**name)).collect();
    let new: Vec<_> = names.iter().filter(|name| !recorded.contains(name.as_str())).collect();
    assert!(
        gone.is_empty() && new.is_empty(),
        "the public API has changed. Gone: {gone:#?}\nNew: {new:#?}\nIf that is intended, run `cargo xtask api`, and say \
         in CHANGELOG.md what was renamed"
    );
}

#[test]
fn the_root_has_few_names_and_no_type_is_public_twice() {
    let api = Api::read();
    let at_the_root: Vec<_> = api.items.iter().filter(|item| item.module.is_empty()).collect();
    assert!(at_the_root.len() <= ROOT_NAMES_MAX, "{} names at the root: {at_the_root:#?}", at_the_root.len());
    assert!(at_the_root.len() > 20, "read only {at_the_root:#?}");
    let mut paths: BTreeMap<(&Path, &str), Vec<&str>> = BTreeMap::new();
    for item in &api.items {
        paths.entry((&item.defined_in, &item.name)).or_default().push(&item.module);
    }
    let twice: Vec<_> = paths.iter().filter(|(_, modules)| modules.len() > 1).collect();
    assert!(twice.is_empty(), "public at two paths: {twice:#?}");
}

/// The public items and their paths.
#[derive(Default)]
struct Api {
    items: Vec<Item>,
    /// Methods by file and type.
    methods: BTreeMap<(PathBuf, String), BTreeSet<String>>,
}

#[derive(Debug)]
struct Item {
    /// `pool` or `store::redis`; empty for the root.
    module: String,
    name: String,
    defined_in: PathBuf,
}

impl Api {
    fn read() -> Self {
        let mut api = Self::default();
        let source = root().join("crates/leasehold/src");
        api.module("", &source.join("lib.rs"), &source);
        let sources = Sources::read(&source);
        for (path, text) in &sources.0 {
            api.methods_in(path, text, &sources);
        }
        api
    }

    fn names(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for Item { module, name, defined_in } in &self.items {
            let separator = if module.is_empty() { "" } else { "::" };
            let path = format!("leasehold::{module}{separator}{name}");
            for method in self.methods.get(&(defined_in.clone(), name.clone())).into_iter().flatten() {
                names.insert(format!("{path}::{method}"));
            }
            names.insert(path);
        }
        names
    }

    /// Reads a public module and its submodules. `source` is the directory of their files.
    fn module(&mut self, module: &str, file: &Path, source: &Path) {
        let text = production(file);
        let mut hidden = false;
        for statement in statements(&text) {
            let line = statement.lines().last().expect("a line");
            hidden |= line.contains("doc(hidden)") || line.contains("cfg(doctest)") || line.contains("all(doctest");
            if line.starts_with("#[") || line.starts_with("//") || line.starts_with("))]") {
                continue;
            }
            if !std::mem::take(&mut hidden) {
                self.statement(module, file, source, &statement);
            }
        }
    }

    fn statement(&mut self, module: &str, file: &Path, source: &Path, statement: &str) {
        let Some(rest) = statement.strip_prefix("pub ") else { return };
        if let Some(name) = rest.strip_prefix("mod ") {
            let name = name.trim_end_matches([';', ' ', '{']);
            let inner = if module.is_empty() { name.to_owned() } else { format!("{module}::{name}") };
            self.push(module, name, file);
            let (one, many) = (source.join(format!("{name}.rs")), source.join(name).join("mod.rs"));
            let file = if one.exists() { one } else { many };
            return self.module(&inner, &file, &source.join(name));
        }
        if let Some(used) = rest.strip_prefix("use ") {
            for path in flattened(used.trim_end_matches(';')) {
                let name = path.rsplit("::").next().expect("a name").to_owned();
                self.push(module, &name, &defined_in(&path, &name, file));
            }
            return;
        }
        self.push(module, item_name(statement).expect("a name"), file);
    }

    fn push(&mut self, module: &str, name: &str, defined_in: &Path) {
        let (module, name, defined_in) = (module.to_owned(), name.to_owned(), defined_in.to_owned());
        self.items.push(Item { module, name, defined_in });
    }

    /// Reads the public methods in a file. A method belongs to the file that defines its type.
    fn methods_in(&mut self, path: &Path, text: &str, sources: &Sources) {
        let mut of: Option<(PathBuf, String)> = None;
        let mut hidden = false;
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if line.starts_with("impl") || line.starts_with("pub trait ") {
                of = type_of(line).map(|name| (sources.definition(path, &name), name));
            } else if line.starts_with('}') {
                of = None;
            }
            let Some(of) = &of else { continue };
            let mut add = |name: &str| {
                self.methods.entry(of.clone()).or_default().insert(name.to_owned());
            };
            let Some(inner) = line.strip_prefix("    ").filter(|inner| !inner.starts_with(' ')) else { continue };
            hidden |= inner.contains("doc(hidden)");
            if inner.starts_with("#[") || inner.starts_with("//") {
                continue;
            }
            // Setters of a macro: `setters!(ttl, owner);`, or one per line with its type.
            if let Some(first) = inner.strip_prefix("setters!") {
                let mut list = first.to_owned();
                while !list.trim_end().ends_with(';') && !list.ends_with('}') {
                    let Some(line) = lines.next() else { break };
                    if !line.trim_start().starts_with("//") {
                        list.push_str(line.trim());
                    }
                }
                let names = list.split([',', '(', ')', '{', '}', ';']);
                names
                    .filter_map(|name| name.split(':').next())
                    .map(str::trim)
                    .filter(|name| !name.is_empty())
                    .for_each(add);
                continue;
            }
            if !std::mem::take(&mut hidden)
                && let Some(name) = item_name(inner)
            {
                add(name);
            }
        }
    }
}

/// The sources of the library, without tests.
struct Sources(BTreeMap<PathBuf, String>);

impl Sources {
    fn read(source: &Path) -> Self {
        let mut all = Vec::new();
        files(source, "rs", &mut all);
        Self(all.into_iter().map(|path| (path.clone(), production(&path))).collect())
    }

    /// Returns the file that defines the type of an `impl`: its own file, or the first that defines a type of that name. The types
    /// in `blocking` have the same names as those that they wrap, and are defined beside their methods.
    fn definition(&self, path: &Path, name: &str) -> PathBuf {
        if defines(&self.0[path], name) {
            return path.to_owned();
        }
        let elsewhere = |(file, text): &(&PathBuf, &String)| {
            !file.components().any(|part| part.as_os_str() == "blocking") && defines(text, name)
        };
        self.0.iter().find(elsewhere).map_or_else(|| path.to_owned(), |(file, _)| file.clone())
    }
}

/// Returns a source without its tests.
fn production(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.split("\n#[cfg(test)]\nmod tests").next().expect("a first part").to_owned()
}

/// Returns the lines at the left margin, with each `use` as one line.
fn statements(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut in_use = false;
    for line in text.lines() {
        if in_use {
            found.last_mut().expect("its beginning").push_str(line.trim());
            in_use = !line.ends_with(';');
        } else if !line.is_empty() && !line.starts_with([' ', '}']) {
            in_use = line.starts_with("pub use ") && !line.ends_with(';');
            found.push(line.to_owned());
        }
    }
    found
}

/// Returns the paths of `a::{b, c::d}`.
fn flattened(used: &str) -> Vec<String> {
    match used.split_once("::{") {
        Some((before, inside)) => {
            let inside = inside.trim_end_matches('}').split(',').map(str::trim);
            inside.filter(|name| !name.is_empty()).map(|name| format!("{before}::{name}")).collect()
        }
        None => vec![used.to_owned()],
    }
}

/// Returns the file below `crates/leasehold/src` that defines an item.
fn defined_in(path: &str, name: &str, file: &Path) -> PathBuf {
    if path.starts_with("leasehold_macros") {
        return PathBuf::from(path);
    }
    let source = root().join("crates/leasehold/src");
    let near = if path.starts_with("crate::") { source.join("lib.rs") } else { file.to_owned() };
    let first = path.trim_start_matches("crate::").split("::").next().expect("a module");
    let beside = near.parent().expect("a directory");
    let within = [beside.join(format!("{first}.rs")), beside.join(first)];
    let mut files_of_it = Vec::new();
    for place in within.iter().filter(|place| place.exists()) {
        if place.is_dir() { files(place, "rs", &mut files_of_it) } else { files_of_it.push(place.clone()) }
    }
    let defines = |file: &&PathBuf| defines(&production(file), name);
    files_of_it.iter().find(defines).cloned().unwrap_or_else(|| panic!("nothing defines {path}"))
}

/// Returns whether a text defines a public item of this name. Inside a macro it is indented.
fn defines(text: &str, name: &str) -> bool {
    let indented = |line: &&str| line.starts_with("pub ") || line.trim_start().starts_with("pub struct ");
    text.lines().filter(indented).any(|line| item_name(line.trim_start()) == Some(name))
}

/// Returns the name of the public item that begins on a line.
fn item_name(line: &str) -> Option<&str> {
    const KINDS: [&str; 8] = ["async", "const", "enum", "fn", "static", "struct", "trait", "type"];
    let rest = line.strip_prefix("pub ")?;
    let mut words = rest.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).peekable();
    words.next_if(|word| KINDS.contains(word))?;
    words.find(|word| !KINDS.contains(word))
}

/// Returns the type of an inherent `impl`, or the name of a trait.
fn type_of(line: &str) -> Option<String> {
    let rest = match line.strip_prefix("impl") {
        Some(_) if line.contains(" for ") => return None,
        Some(rest) if rest.starts_with('<') => rest.split_once("> ").map_or(rest, |(_, rest)| rest),
        Some(rest) => rest,
        None => line.strip_prefix("pub trait ")?,
    };
    let name: String = rest.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!name.is_empty()).then_some(name)
}

//! The library's public API, with its signatures, computed from the sources and compared with a committed list.
//!
//! rustdoc's JSON, which the usual tools read, needs a nightly compiler. This reads the sources as rustfmt writes them:
//! an item at the beginning of a line, its members at one indentation. Types are not resolved: a signature is the text of
//! the source. Impls that a macro writes are not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::{files, read, root};

/// The most names at the root of the crate: types, functions, macros and modules.
const ROOT_NAMES_MAX: usize = 25;
const LIST: &str = "crates/leasehold/public-api.txt";
/// Set by `cargo xtask api`, which writes the list instead of comparing it.
const WRITE: &str = "LEASEHOLD_API_WRITE";

#[test]
fn the_public_api_is_the_recorded_one() {
    let api = Api::read().lines();
    let text: String = api.iter().map(|line| format!("{line}\n")).collect();
    if std::env::var_os(WRITE).is_some() {
        fs::write(root().join(LIST), text).expect("written");
        return;
    }
    let recorded = read(LIST);
    let recorded: BTreeSet<&str> = recorded.lines().collect();
    let gone: Vec<_> = recorded.iter().filter(|line| !api.contains(**line)).collect();
    let new: Vec<_> = api.iter().filter(|line| !recorded.contains(line.as_str())).collect();
    assert!(
        gone.is_empty() && new.is_empty(),
        "the public API has changed. Gone: {gone:#?}\nNew: {new:#?}\nIf that is intended, run `cargo xtask api`, and say \
         in CHANGELOG.md what has changed"
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

#[test]
fn signatures_are_read_as_rustfmt_writes_them() {
    let text = "\
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Answer<'a> {
    /// Taken.
    Held {
        /// By whom.
        by: &'a str,
        #[source]
        cause: Cause,
    },
    Free(Fence),
    Unknown,
}

pub struct Fence(u64);

pub struct Place {
    pub name: String,
    secret: Token,
}

impl Fence {
    pub const NONE: Self = Self(0);

    #[doc(hidden)]
    pub fn raw(&self) -> u64 {
        self.0
    }

    pub async fn check<T>(
        &self,
        limit: Duration,
    ) -> Result<T, Error>
    where
        T: Send,
    {
        todo()
    }

    fn private(&self) {}
}

impl From<u64> for Fence {
    fn from(n: u64) -> Self {
        Self(n)
    }
}

impl Internal for Fence {}

pub(crate) trait Internal {}

pub trait Store: Send {
    type Key;
    fn get(&self) -> u64;
    fn put(&self) {}
}
";
    let path = PathBuf::from("answer.rs");
    let sources = Sources(BTreeMap::from([(path.clone(), text.to_owned())]));
    let mut api = Api::default();
    api.members_in(&path, text, &sources);
    let of = |name: &str| {
        let members = &api.members[&(path.clone(), name.to_owned())];
        members.iter().map(String::as_str).collect::<Vec<_>>()
    };
    let answer = [
        ": #[non_exhaustive] enum Answer<'a>",
        ": impl Clone",
        ": impl Debug",
        "::Free: Free(Fence)",
        "::Held: Held { by: &'a str, cause: Cause }",
        "::Unknown: Unknown",
    ];
    assert_eq!(of("Answer"), answer);
    let fence = [
        ": impl From<u64> for Fence",
        ": struct Fence(_)",
        "::NONE: const NONE: Self",
        "::check: async fn check<T>(&self, limit: Duration) -> Result<T, Error> where T: Send",
    ];
    assert_eq!(of("Fence"), fence);
    assert_eq!(of("Place"), [": struct Place { .. }", "::name: name: String"]);
    let store = [": trait Store: Send", "::Key: type Key", "::get: fn get(&self) -> u64", "::put: fn put(&self) {..}"];
    assert_eq!(of("Store"), store);
}

/// What is public, and where.
#[derive(Default)]
struct Api {
    items: Vec<Item>,
    /// By the file and name of an item: its signature, impls and members, each as `: text` or `::member: text`.
    members: BTreeMap<(PathBuf, String), BTreeSet<String>>,
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
            api.members_in(path, text, &sources);
        }
        api
    }

    fn lines(&self) -> BTreeSet<String> {
        let mut lines = BTreeSet::new();
        for Item { module, name, defined_in } in &self.items {
            let separator = if module.is_empty() { "" } else { "::" };
            let path = format!("leasehold::{module}{separator}{name}");
            match self.members.get(&(defined_in.clone(), name.clone())) {
                Some(members) => lines.extend(members.iter().map(|member| format!("{path}{member}"))),
                // A module, or a macro of another crate.
                None => _ = lines.insert(path),
            }
        }
        lines
    }

    /// Reads a public module and those inside it. `source` is where the files of its children are.
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

    /// Reads the items of a file, their impls and members. Those of a type that another file defines are counted to the
    /// file that defines it.
    fn members_in(&mut self, path: &Path, text: &str, sources: &Sources) {
        let lines: Vec<&str> = text.lines().collect();
        let mut attributes = Attributes::default();
        // The item whose members follow, and what kind of members they are.
        let mut of: Option<((PathBuf, String), Kind)> = None;
        let mut at = 0;
        while at < lines.len() {
            let line = lines[at];
            let inner = line.trim_start();
            let indent = line.len() - inner.len();
            // A struct in a macro's definition is deeper.
            let is_item = indent == 0 || (inner.starts_with("pub struct ") && of.is_none());
            let is_member = indent == 4 && of.is_some();
            if inner.is_empty() || inner.starts_with("//") || !(is_item || is_member) {
                at += 1;
                continue;
            }
            if inner.starts_with("#[") {
                at = attributes.read(&lines, at);
                continue;
            }
            let attributes = std::mem::take(&mut attributes);
            if let Some(list) = inner.strip_prefix("setters!").or_else(|| line.strip_prefix("counters!")) {
                let item = match &of {
                    Some((item, _)) => item.clone(),
                    None => (path.to_owned(), String::from("Statistics")),
                };
                at = self.written_by_macro(item, list, &lines, at, sources);
                continue;
            }
            let (signature, end) = signature(&lines, at);
            at = end + 1;
            if !is_item {
                if let Some((item, kind)) = &of
                    && !attributes.hidden
                    && let Some(member) = kind.member(&signature)
                {
                    self.add(item, &member);
                }
                continue;
            }
            of = None;
            if let Some(name) = item_name(inner) {
                let item = (path.to_owned(), name.to_owned());
                attributes.derived.iter().for_each(|of| self.add(&item, &format!(": impl {of}")));
                let kind = Kind::of(&signature);
                let body = lines[end..].iter().take_while(|line| !line.starts_with('}'));
                let is_field = |line: &&&str| line.starts_with("    ") && !line.starts_with("     ");
                let private = body.filter(is_field).any(|line| {
                    let field = line.trim_start();
                    !field.starts_with("pub ") && !field.starts_with(['#', '/', '}', ')'])
                });
                let text = match kind {
                    Some(Kind::Struct) if indent > 0 => signature.split(" {").next().expect("a name").to_owned(),
                    Some(Kind::Struct) if signature.ends_with('{') && private => format!("{signature} .. }}"),
                    Some(Kind::Struct) if !signature.contains("(pub ") => match signature.split_once('(') {
                        Some((before, _)) => format!("{before}(_)"),
                        None => signature.clone(),
                    },
                    _ => signature.clone(),
                };
                self.add(&item, &format!(": {}{}", attributes.non_exhaustive, bare(&text)));
                of = kind.map(|kind| (item, kind));
            } else if signature.starts_with("impl") {
                let (of_trait, name) = implemented(&signature);
                let item = (sources.definition(path, &name), name);
                match of_trait {
                    Some(of_trait) if !sources.is_private_trait(of_trait) => {
                        self.add(&item, &format!(": {}", bare(&signature)));
                    }
                    Some(_) => {}
                    None => of = Some((item, Kind::Impl)),
                }
            }
        }
    }

    fn add(&mut self, item: &(PathBuf, String), member: &str) {
        self.members.entry(item.clone()).or_default().insert(member.to_owned());
    }

    /// What a macro writes: the setters of a request (`setters!(ttl, owner);`), the setters of the options (a line for each
    /// with its type), and the fields of the counters. Returns the line after it.
    fn written_by_macro(
        &mut self,
        item: (PathBuf, String),
        first: &str,
        lines: &[&str],
        mut at: usize,
        sources: &Sources,
    ) -> usize {
        let mut list = first.to_owned();
        while !list.trim_end().ends_with([';', '}']) {
            at += 1;
            if !lines[at].trim_start().starts_with("//") {
                list.push_str(lines[at].trim());
            }
        }
        let names = list.trim_matches(['(', ')', '{', '}', ';', ' ']).split(',').map(str::trim);
        for name in names.filter(|name| !name.is_empty()) {
            let member = match name.split_once(": ") {
                Some((name, of)) => format!("::{name}: fn {name}(mut self, {name}: {of}) -> Self"),
                None if first.starts_with('(') => format!("::{name}: {}", sources.setter(name)),
                None => format!("::{name}: {name}: u64"),
            };
            self.add(&item, &member);
        }
        at + 1
    }
}

/// The attributes before an item or a member, as far as they belong to the API.
#[derive(Default)]
struct Attributes {
    hidden: bool,
    non_exhaustive: &'static str,
    derived: Vec<String>,
}

impl Attributes {
    /// Reads the attribute at a line. Returns the line after it.
    fn read(&mut self, lines: &[&str], mut at: usize) -> usize {
        let mut text = lines[at].trim().to_owned();
        while !text.ends_with(']') {
            at += 1;
            text.push_str(lines[at].trim());
        }
        self.hidden |= text.contains("doc(hidden)");
        if text == "#[non_exhaustive]" {
            self.non_exhaustive = "#[non_exhaustive] ";
        }
        if let Some(derived) = text.strip_prefix("#[derive(") {
            let names = derived.trim_end_matches(")]").split(',').map(|name| name.trim().to_owned());
            self.derived.extend(names.filter(|name| !name.is_empty()));
        }
        at + 1
    }
}

/// What an item's members are.
#[derive(Clone, Copy)]
enum Kind {
    Struct,
    Enum,
    Trait,
    Impl,
}

impl Kind {
    fn of(signature: &str) -> Option<Self> {
        let kinds = [("pub struct ", Self::Struct), ("pub enum ", Self::Enum), ("pub trait ", Self::Trait)];
        kinds.into_iter().find(|(start, _)| signature.starts_with(start)).map(|(_, kind)| kind)
    }

    /// A public member as `::name: text`.
    fn member(self, signature: &str) -> Option<String> {
        let text = match self {
            Self::Struct | Self::Impl => signature.strip_prefix("pub ")?,
            Self::Enum | Self::Trait => signature,
        };
        const KINDS: [&str; 5] = ["async ", "const ", "unsafe ", "fn ", "type "];
        let mut name = text;
        while let Some(rest) = KINDS.iter().find_map(|kind| name.strip_prefix(kind)) {
            name = rest;
        }
        let name: String = name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let has_body = matches!(self, Self::Trait) && signature.ends_with(['{', '}']);
        (!name.is_empty()).then(|| format!("::{name}: {}{}", bare(text), if has_body { " {..}" } else { "" }))
    }
}

/// The signature that begins at a line, in one line, with the last character that rustfmt writes there: `{`, `;` or `,`.
/// Returns the line where it ends as well.
fn signature(lines: &[&str], start: usize) -> (String, usize) {
    let indent = lines[start].len() - lines[start].trim_start().len();
    let is_variant = indent > 0 && lines[start].trim_start().starts_with(char::is_uppercase);
    let mut text = String::new();
    let mut at = start;
    loop {
        let line = lines[at].trim();
        if at == start || !line.starts_with(['#', '/']) {
            text.push_str(if text.is_empty() { "" } else { " " });
            text.push_str(line);
        }
        let at_the_margin = lines[at].len() - lines[at].trim_start().len() == indent;
        let ends = match is_variant {
            // `Held {` goes on to `},`.
            true => at_the_margin && line.ends_with([',', '}', ';']),
            false => line.ends_with(['{', '}', ';']) || (at_the_margin && line.ends_with(',') && !line.ends_with("(,")),
        };
        if ends || at + 1 == lines.len() {
            break;
        }
        at += 1;
    }
    let joined = [("( ", "("), (", )", ")"), (" )", ")"), (", }", " }"), ("< ", "<"), (", >", ">")];
    (joined.iter().fold(text, |text, (from, to)| text.replace(from, to)), at)
}

/// A signature without `pub`, a constant's value and the punctuation at its end.
fn bare(signature: &str) -> String {
    let text = signature.strip_prefix("pub ").unwrap_or(signature);
    if let Some((constant, _)) =
        text.split_once(" = ").filter(|_| text.starts_with("const ") || text.starts_with("static "))
    {
        return constant.to_owned();
    }
    if text.ends_with(".. }") || (text.ends_with("},") && !text.ends_with("{},")) {
        return text.trim_end_matches(',').to_owned();
    }
    text.trim_end_matches("{}").trim_end_matches([' ', '{', ';', ',']).to_owned()
}

/// All sources of the library, without their tests.
struct Sources(BTreeMap<PathBuf, String>);

impl Sources {
    fn read(source: &Path) -> Self {
        let mut all = Vec::new();
        files(source, "rs", &mut all);
        Self(all.into_iter().map(|path| (path.clone(), production(&path))).collect())
    }

    /// The file that defines the type of an `impl`: its own, or else the first that defines a type of that name. Those in
    /// `blocking` have the names of the types that they wrap, and are defined where their methods are.
    fn definition(&self, path: &Path, name: &str) -> PathBuf {
        if defines(&self.0[path], name) {
            return path.to_owned();
        }
        let elsewhere = |(file, text): &(&PathBuf, &String)| {
            !file.components().any(|part| part.as_os_str() == "blocking") && defines(text, name)
        };
        self.0.iter().find(elsewhere).map_or_else(|| path.to_owned(), |(file, _)| file.clone())
    }

    /// Whether a trait of this name is the library's own and not public.
    fn is_private_trait(&self, name: &str) -> bool {
        let name = name.split('<').next().expect("a first part");
        let starts = ["trait", "pub(crate) trait", "pub(super) trait"].map(|start| format!("{start} {name}"));
        let is_its = |line: &str| {
            let rest = starts.iter().find_map(|start| line.strip_prefix(start));
            rest.is_some_and(|rest| rest.starts_with([' ', ':', '<']))
        };
        self.0.values().any(|text| text.lines().any(is_its))
    }

    /// The signature of a setter that the macro in `lease/terms.rs` writes.
    fn setter(&self, name: &str) -> String {
        let (_, text) = self.0.iter().find(|(path, _)| path.ends_with("lease/terms.rs")).expect("the macro's file");
        let lines: Vec<&str> = text.lines().collect();
        let start = format!("pub fn {name}(");
        let at = lines.iter().position(|line| line.trim_start().starts_with(&start));
        bare(&signature(&lines, at.unwrap_or_else(|| panic!("no setter {name}"))).0)
    }
}

/// A source without its tests.
fn production(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.split("\n#[cfg(test)]\nmod tests").next().expect("a first part").to_owned()
}

/// The lines at the left margin; a `use` as a whole.
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

/// The paths of `a::{b, c::d}`.
fn flattened(used: &str) -> Vec<String> {
    match used.split_once("::{") {
        Some((before, inside)) => {
            let inside = inside.trim_end_matches('}').split(',').map(str::trim);
            inside.filter(|name| !name.is_empty()).map(|name| format!("{before}::{name}")).collect()
        }
        None => vec![used.to_owned()],
    }
}

/// The file below `crates/leasehold/src` that defines what a path names.
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

/// Whether a text defines a public item of this name. Inside a macro it is indented.
fn defines(text: &str, name: &str) -> bool {
    let indented = |line: &&str| line.starts_with("pub ") || line.trim_start().starts_with("pub struct ");
    text.lines().filter(indented).any(|line| item_name(line.trim_start()) == Some(name))
}

/// The name of the public item that a line begins.
fn item_name(line: &str) -> Option<&str> {
    const KINDS: [&str; 8] = ["async", "const", "enum", "fn", "static", "struct", "trait", "type"];
    let rest = line.strip_prefix("pub ")?;
    let mut words = rest.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).peekable();
    words.next_if(|word| KINDS.contains(word))?;
    words.find(|word| !KINDS.contains(word))
}

/// The trait, if there is one, and the type of an `impl`.
fn implemented(signature: &str) -> (Option<&str>, String) {
    let rest = signature.strip_prefix("impl").expect("an impl");
    // The end of `<T: Fn() -> R>`.
    let mut depth = 0;
    let end = rest.bytes().zip(rest.bytes().skip(1)).position(|(before, byte)| {
        depth += i32::from(before == b'<') - i32::from(byte == b'>' && before != b'-');
        depth == 0
    });
    let rest = if rest.starts_with('<') { &rest[end.map_or(0, |end| end + 2)..] } else { rest };
    let (of_trait, of_type) = match rest.split_once(" for ") {
        Some((of_trait, of_type)) => (Some(of_trait.trim()), of_type),
        None => (None, rest),
    };
    let name =
        of_type.trim().trim_start_matches('&').chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (of_trait, name)
}

//! The structure of the code: layers, names, clocks, background work and the reading order of ARCHITECTURE.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The library's modules, lowest layer first. A module uses its own layer and those before it. Where a file of a module is
/// in another layer than the rest, it is named, too.
const LAYERS: &[(&str, &[&str])] = &[
    ("facts", &["backoff", "clock", "facts", "loss", "rules"]),
    ("pure", &["lease/belief", "machine"]),
    ("stores", &["events/lock_event", "store"]),
    ("client", &["client", "events", "journal", "options"]),
    ("engine", &["engine", "error", "inspect/view", "metrics", "stats"]),
    ("handles", &["inspect", "installed", "lease", "manager", "pool", "request", "scope", "store/open"]),
    ("uses", &["attribute", "bindings", "blocking", "config", "elect", "once"]),
    ("edges", &["gpu", "http"]),
];

/// What a module may use of a layer above its own, and why.
const EXCEPTIONS: &[(&str, &str, &str)] =
    &[("engine/guard", "lease", "`Guard::detach` returns the lease without a guard, which is a handle")];

/// Types that two modules of a crate define under one name, and why.
const TWINS: &[(&str, &str, &str)] = &[
    ("leasehold", "Guard", "`blocking` mirrors the async API"),
    ("leasehold", "LockManager", "`blocking` mirrors the async API"),
    ("leasehold", "LockRequest", "`blocking` mirrors the async API"),
];

/// Directories in which no file uses another that uses it in turn, directly or through others.
const ACYCLIC: &[&str] = &["client", "engine", "machine", "store/redis", "store/sqlite"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn library() -> PathBuf {
    root().join("crates/leasehold/src")
}

/// A source file: its path within `dir`, and its production code without comments.
struct Source {
    path: String,
    code: String,
}

fn sources(dir: &Path) -> Vec<Source> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(next) = dirs.pop() {
        for entry in fs::read_dir(&next).expect("a directory").map(|entry| entry.expect("an entry").path()) {
            if entry.is_dir() {
                dirs.push(entry);
            } else if entry.extension().is_some_and(|ending| ending == "rs") {
                let path = entry.strip_prefix(dir).expect("within").to_string_lossy().into_owned();
                let text = fs::read_to_string(&entry).expect("a source");
                found.push(Source { path, code: production(&text) });
            }
        }
    }
    // Test modules in files of their own.
    found.retain(|source| {
        !["explore/", "simulation/", "tests/", "client/visit.rs", "simulated.rs"]
            .iter()
            .any(|part| source.path.contains(part))
            && !source.path.ends_with("tests.rs")
    });
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// The part before the unit tests, without comments.
fn production(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.map(|line| format!("{line}\n")).collect()
}

/// The layer of a module path such as `store/redis/keys`: that of its longest prefix.
fn layer(path: &str) -> Option<usize> {
    let is_prefix =
        |module: &str| path.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let modules =
        LAYERS.iter().enumerate().flat_map(|(at, (_, modules))| modules.iter().map(move |module| (at, *module)));
    modules.filter(|(_, module)| is_prefix(module)).max_by_key(|(_, module)| module.len()).map(|(at, _)| at)
}

/// The modules that code names after `crate::`, with slashes: of each path the part in small letters.
fn used(code: &str) -> BTreeSet<String> {
    let within = paths(code).into_iter().filter(|path| path[0] == "crate");
    let is_module = |word: &&str| word.starts_with(|c: char| c.is_ascii_lowercase());
    let modules = within.map(|path| path[1..].iter().copied().take_while(is_module).collect::<Vec<_>>().join("/"));
    modules.filter(|path| !path.is_empty()).collect()
}

/// The paths that code names, word by word. A list in braces is a path for each entry.
fn paths(code: &str) -> Vec<Vec<&str>> {
    let (mut found, mut before, mut end) = (Vec::new(), ' ', 0);
    for (at, c) in code.char_indices() {
        let is_first = c.is_alphabetic() && !before.is_alphanumeric() && before != '_' && before != ':';
        before = c;
        if at >= end && is_first && code[at + word_end(&code[at..])..].starts_with("::") {
            end = code.len() - read_path(&code[at..], &[], &mut found).len();
        }
    }
    found
}

fn word_end(text: &str) -> usize {
    text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len())
}

/// Reads one path, or a list of paths in braces. Returns what is left of the text.
fn read_path<'a>(text: &'a str, before: &[&'a str], found: &mut Vec<Vec<&'a str>>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut list) = text.strip_prefix('{') {
        loop {
            list = read_path(list, before, found);
            // Skips `as`.
            list = &list[list.find([',', '}']).unwrap_or(list.len())..];
            match list.strip_prefix(',') {
                Some(more) if !more.trim_start().starts_with('}') => list = more,
                _ => return list.trim_start_matches([',', ' ', '\n']).strip_prefix('}').unwrap_or(list),
            }
        }
    }
    let (word, rest) = text.split_at(word_end(text));
    let path = [before, &[word]].concat();
    match rest.strip_prefix("::") {
        Some(rest) => read_path(rest, &path, found),
        None => {
            found.push(path);
            rest
        }
    }
}

/// What each file of a directory uses of the others. A file is its module path; the directory's own `mod.rs` is empty.
fn uses_within(dir: &str) -> BTreeMap<String, BTreeSet<String>> {
    let module = |path: &str| {
        let path = path.trim_end_matches(".rs");
        path.strip_suffix("/mod").unwrap_or(if path == "mod" { "" } else { path }).to_owned()
    };
    let sources: BTreeMap<String, Source> =
        sources(&library().join(dir)).into_iter().map(|source| (module(&source.path), source)).collect();
    // Where a module finds the names that it takes from its children, and passes on.
    let mut taken: BTreeMap<(&str, &str), String> = BTreeMap::new();
    for (module, source) in &sources {
        for path in paths(&source.code) {
            let (child, name) = (if path[0] == "self" { path[1..].first() } else { path.first() }, path.last());
            let child = child.map(|child| join(module, child)).filter(|child| sources.contains_key(child));
            if let (Some(child), Some(name)) = (child, name) {
                taken.insert((module, name), child);
            }
        }
    }
    let outside: Vec<&str> = ["crate"].into_iter().chain(dir.split('/')).collect();
    let resolve = |module: &str, path: &[&str]| {
        let (mut at, mut rest) = (Some(module.to_owned()), path);
        if let Some(inside) = path.strip_prefix(&outside[..]) {
            (at, rest) = (Some(String::new()), inside);
        } else if path[0] != "self" && path[0] != "super" {
            at = at.filter(|module| sources.contains_key(&join(module, path[0])));
        }
        while let ["self" | "super", more @ ..] = rest {
            if rest[0] == "super" {
                let module = at?;
                at = (!module.is_empty()).then(|| module.rsplit_once('/').map_or("", |(parent, _)| parent).to_owned());
            }
            rest = more;
        }
        let mut at = at?;
        for word in rest {
            match (sources.contains_key(&join(&at, word)), taken.get(&(at.as_str(), word))) {
                (true, _) => at = join(&at, word),
                (false, Some(child)) => return Some(child.clone()),
                (false, None) => break,
            }
        }
        Some(at)
    };
    let uses = |module: &str, code: &str| {
        let used = paths(code).into_iter().filter_map(|path| resolve(module, &path));
        used.filter(|used| used != module).collect()
    };
    sources.iter().map(|(module, source)| (module.clone(), uses(module, &source.code))).collect()
}

fn join(module: &str, child: &str) -> String {
    if module.is_empty() { child.to_owned() } else { format!("{module}/{child}") }
}

/// The files that use each other in a cycle, and what they use of each other.
fn cycles(mut uses: BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let left: BTreeSet<String> = uses.keys().cloned().collect();
        uses.values_mut().for_each(|used| used.retain(|file| left.contains(file)));
        let used: BTreeSet<String> = uses.values().flatten().cloned().collect();
        uses.retain(|file, uses| !uses.is_empty() && used.contains(file));
        if uses.len() == left.len() {
            return uses;
        }
    }
}

#[test]
fn files_do_not_use_each_other_in_a_cycle() {
    for dir in ACYCLIC {
        let cycles = cycles(uses_within(dir));
        assert!(cycles.is_empty(), "files of {dir} use each other in a cycle: {cycles:#?}");
    }
}

#[test]
fn each_layer_uses_only_itself_and_those_below() {
    let mut upward = BTreeSet::new();
    let mut needed = BTreeSet::new();
    for source in sources(&library()) {
        let from = source.path.trim_end_matches(".rs").trim_end_matches("/mod");
        if from == "lib" {
            continue;
        }
        let Some(own) = layer(from) else { panic!("{from} is in no layer") };
        // What the exploration needs of the types that it visits.
        for to in used(&source.code).into_iter().filter(|to| to != "client/visit") {
            if layer(&to).is_none_or(|theirs| theirs <= own) {
                continue;
            }
            match EXCEPTIONS.iter().find(|(a, b, _)| from == *a && to.starts_with(b)) {
                Some((a, b, _)) => drop(needed.insert((*a, *b))),
                None => drop(upward.insert(format!("{from} uses {to}"))),
            }
        }
    }
    assert!(upward.is_empty(), "lower layers use higher ones: {upward:#?}");
    for (from, to, _) in EXCEPTIONS {
        assert!(needed.contains(&(*from, *to)), "{from} does not use {to} any more: remove the exception");
    }
}

#[test]
fn no_type_name_is_defined_twice_in_a_crate() {
    let mut twice = Vec::new();
    let crates = fs::read_dir(root().join("crates")).expect("crates").map(|entry| entry.expect("an entry").path());
    for dir in crates.chain([root().join("python")]) {
        let name = dir.file_name().expect("a name").to_string_lossy().into_owned();
        let mut defined: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for source in sources(&dir.join("src")) {
            for line in source.code.lines() {
                if let Some(defined_here) = type_defined(line) {
                    defined.entry(defined_here.to_owned()).or_default().push(source.path.clone());
                }
            }
        }
        for (defined, files) in defined.into_iter().filter(|(_, files)| files.len() > 1) {
            if !TWINS.iter().any(|(of, twin, _)| *of == name && *twin == defined) {
                twice.push(format!("{name}: {defined} in {}", files.join(" and ")));
            }
        }
    }
    assert!(twice.is_empty(), "a name means one thing in a crate:\n{}", twice.join("\n"));
}

/// The type that a line defines. Associated types are indented, and are not types of their own.
fn type_defined(line: &str) -> Option<&str> {
    let visible = line.trim_start();
    let rest = match visible.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ").map_or(rest, |(_, rest)| rest),
        Some(rest) => rest.trim_start(),
        None => visible,
    };
    let (keyword, rest) = rest.split_once(' ')?;
    let is_type = ["struct", "enum", "trait"].contains(&keyword) || (keyword == "type" && line == visible);
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    Some(&rest[..end]).filter(|_| is_type)
}

/// The rows of a table of ARCHITECTURE.md, by the heading above it.
fn architecture(heading: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let (_, section) = text.split_once(&format!("## {heading}\n")).unwrap_or_else(|| panic!("no section {heading}"));
    let section = section.split("\n## ").next().unwrap_or_default();
    section.lines().map(str::to_owned).collect()
}

/// The words between backquotes.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

#[test]
fn the_inventory_names_every_file_that_starts_a_task_or_a_thread() {
    let starts = ["spawn(", "spawn_on(", "spawn_until_end(", "spawn_blocking("];
    let mut starting = BTreeSet::new();
    for source in sources(&library()) {
        let has_one = |line: &str| starts.iter().any(|start| line.contains(start)) && !line.contains("fn spawn");
        if source.code.lines().any(has_one) {
            starting.insert(source.path);
        }
    }
    let listed = architecture("Tasks and threads");
    let listed: BTreeSet<String> =
        listed.iter().flat_map(|line| quoted(line)).filter(|word| word.ends_with(".rs")).map(str::to_owned).collect();
    assert_eq!(listed, starting, "the inventory in ARCHITECTURE.md (left) and the code (right) disagree");
}

#[test]
fn every_stop_of_the_reading_order_exists() {
    let lines = architecture("An acquire in ten stops");
    let mut stops = 0;
    for stop in lines.iter().flat_map(|line| quoted(line)).filter(|word| word.contains("::")) {
        let (file, function) = stop.split_once("::").expect("file::function");
        let source = fs::read_to_string(library().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        let there = source.contains(&format!("fn {function}(")) || source.contains(&format!("fn {function}<"));
        assert!(there, "{file} has no function {function}");
        stops += 1;
    }
    assert_eq!(stops, 10, "ten stops");
}

#[test]
fn every_term_of_the_glossary_is_defined_once() {
    let lines = architecture("Glossary");
    let terms: Vec<&str> =
        lines.iter().filter_map(|line| line.strip_prefix("- **")?.split_once("**")).map(|(t, _)| t).collect();
    assert!(terms.len() >= 15 && lines.len() <= 40 + 4, "{} terms in {} lines", terms.len(), lines.len());
    let mut sorted = terms.clone();
    sorted.sort_by_key(|term| term.to_lowercase());
    sorted.dedup();
    assert_eq!(terms, sorted, "the glossary is sorted, and each term is in it once");
}

#[test]
fn the_checks_see_what_they_look_for() {
    let code =
        "use crate::facts::Ttl;\nuse crate::{store::{A, redis::C,}, engine};\nlet x = crate::clock::Moment::now();";
    assert_eq!(used(code), ["clock", "engine", "facts", "store", "store/redis"].map(str::to_owned).into());
    let words = [vec!["crate", "a", "B"], vec!["crate", "c"], vec!["super", ""], vec!["d", "e"]];
    assert_eq!(paths("use crate::{a::B as C, c};\nuse super::*;\nlet x: [u8; d::e()] = b\"\";"), words);
    let uses = [("a", vec!["b"]), ("b", vec!["c"]), ("c", vec!["b", "d"]), ("d", vec![])];
    let uses = uses.map(|(file, uses)| (file.to_owned(), uses.into_iter().map(str::to_owned).collect()));
    assert_eq!(cycles(uses.into()).into_keys().collect::<Vec<_>>(), ["b", "c"]);
    let found = uses_within("store/redis");
    assert!(found["client/session"].contains("inbox") && found["inbox"].contains("client/connection"), "{found:#?}");
    assert_eq!(layer("lease/belief"), layer("machine"));
    assert!(layer("lease/terms") > layer("engine") && layer("store/open") > layer("store/redis/keys"));
    assert_eq!(type_defined("pub(super) struct Seat<T> {"), Some("Seat"));
    assert_eq!(type_defined("type Due = (Moment, u64);"), Some("Due"));
    assert_eq!(type_defined("    type Output = ();"), None);
    assert_eq!(type_defined("impl Drop for Seats {"), None);
}

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

/// The paths that code names after `crate::`, with slashes. Of a path only modules are kept: the part in small letters.
fn used(code: &str) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        read_path(rest, "", &mut paths);
    }
    paths
}

/// Reads one path, or a list of paths in braces. Returns what is left of the text.
fn read_path<'a>(text: &'a str, before: &str, paths: &mut BTreeSet<String>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut list) = text.strip_prefix('{') {
        loop {
            list = read_path(list, before, paths).trim_start();
            match list.strip_prefix(',') {
                Some(more) if !more.trim_start().starts_with('}') => list = more,
                _ => return list.trim_start_matches([',', ' ', '\n']).strip_prefix('}').unwrap_or(list),
            }
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    let is_module = word.starts_with(|c: char| c.is_ascii_lowercase());
    let path = match (is_module, before) {
        (false, _) => before.to_owned(),
        (true, "") => word.to_owned(),
        (true, _) => format!("{before}/{word}"),
    };
    match rest.strip_prefix("::") {
        Some(rest) if is_module => read_path(rest, &path, paths),
        _ => {
            paths.extend(Some(path).filter(|path| !path.is_empty()));
            rest
        }
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
fn no_files_of_the_engine_or_the_client_use_each_other_in_a_cycle() {
    for dir in ["engine", "client"] {
        let within = sources(&library()).into_iter().filter(|source| source.path.starts_with(&format!("{dir}/")));
        let files: Vec<Source> = within.collect();
        let names: BTreeSet<String> = files.iter().map(|source| module(&source.path)).collect();
        let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for source in &files {
            let own = module(&source.path);
            let theirs = used_within(dir, source).into_iter().map(|path| owner_of(&path, &names));
            uses.insert(own.clone(), theirs.flatten().filter(|theirs| *theirs != own).collect());
        }
        // A file whose uses are all gone is in no cycle.
        while let Some(free) = uses.iter().find(|(_, theirs)| theirs.is_empty()).map(|(own, _)| own.clone()) {
            uses.remove(&free);
            uses.values_mut().for_each(|theirs| _ = theirs.remove(&free));
        }
        assert!(uses.is_empty(), "these files of {dir}/ use each other in a cycle, or files that do: {uses:#?}");
    }
}

/// The module of a file: `engine/mod.rs` is `engine`.
fn module(path: &str) -> String {
    path.trim_end_matches(".rs").trim_end_matches("/mod").to_owned()
}

/// What a file in `dir` uses, also by `super::`, and in `mod.rs` by the names of its children.
fn used_within(dir: &str, source: &Source) -> BTreeSet<String> {
    let here = format!("crate::{dir}::");
    if !source.path.ends_with("/mod.rs") {
        return used(&source.code.replace("super::", &here));
    }
    let children = source.code.lines().filter_map(|line| line.strip_suffix(';')?.rsplit_once("mod ")).map(|(_, it)| it);
    let code = source.code.replace("self::", &here);
    used(&children.fold(code, |code, child| code.replace(&format!("use {child}::"), &format!("use {here}{child}::"))))
}

/// The file that defines what a path names; `None` outside of the directory.
fn owner_of(path: &str, names: &BTreeSet<String>) -> Option<String> {
    let is_prefix =
        |name: &&String| path.strip_prefix(name.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    names.iter().filter(is_prefix).max_by_key(|name| name.len()).cloned()
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
    assert_eq!(layer("lease/belief"), layer("machine"));
    assert!(layer("lease/terms") > layer("engine") && layer("store/open") > layer("store/redis/keys"));
    assert_eq!(type_defined("pub(super) struct Seat<T> {"), Some("Seat"));
    assert_eq!(type_defined("type Due = (Moment, u64);"), Some("Due"));
    assert_eq!(type_defined("    type Output = ();"), None);
    assert_eq!(type_defined("impl Drop for Seats {"), None);
    let file = |path: &str, code: &str| Source { path: path.into(), code: code.into() };
    let uses = used_within("engine", &file("engine/guard.rs", "use super::{Core, core::lock};"));
    assert_eq!(uses, ["engine", "engine/core/lock"].map(str::to_owned).into());
    let uses = used_within("engine", &file("engine/mod.rs", "mod leases;\nuse leases::Leases;\nuse self::core::Core;"));
    assert_eq!(uses, ["engine/core", "engine/leases"].map(str::to_owned).into());
    let names = ["engine", "engine/core"].map(str::to_owned).into();
    assert_eq!(owner_of("engine/core/lock", &names).as_deref(), Some("engine/core"));
    assert_eq!(owner_of("engine/lock", &names).as_deref(), Some("engine"));
    assert_eq!(owner_of("engines", &names), None);
}

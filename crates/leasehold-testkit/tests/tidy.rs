//! Checks that linters cannot do: that documents and structure match the code.

use std::fs;
use std::path::{Path, PathBuf};

#[path = "tidy/public_api.rs"]
mod public_api;
#[path = "tidy/structure.rs"]
mod structure;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(root().join(&path)).unwrap_or_else(|e| panic!("{}: {e}", path.as_ref().display()))
}

fn files(dir: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a directory").map(|e| e.expect("an entry").path()) {
        if entry.is_dir() {
            files(&entry, ending, found);
        } else if entry.extension().is_some_and(|e| e == ending) {
            found.push(entry);
        }
    }
}

#[test]
fn the_architecture_names_exactly_the_crates_that_exist() {
    let text = read("ARCHITECTURE.md");
    let named: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("/`")).map(|(path, _)| path).collect();
    let mut existing: Vec<String> = fs::read_dir(root().join("crates"))
        .expect("crates")
        .map(|e| format!("crates/{}", e.expect("an entry").file_name().to_string_lossy()))
        .collect();
    existing.extend(["bench".to_owned(), "xtask".to_owned()]);
    existing.sort();
    let mut crates: Vec<&str> =
        named.into_iter().filter(|path| path.starts_with("crates/") || ["bench", "xtask"].contains(path)).collect();
    crates.sort_unstable();
    assert_eq!(crates, existing, "ARCHITECTURE.md and the workspace disagree");
}

#[test]
fn the_architecture_names_exactly_the_files_of_the_library() {
    let text = read("ARCHITECTURE.md");
    for entry in fs::read_dir(root().join("crates/leasehold/src")).expect("sources") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().to_string_lossy().into_owned();
        let shown = if entry.path().is_dir() { format!("`{name}/`") } else { format!("`{name}`") };
        let minor = ["lib.rs", "journal.rs", "options.rs", "stats.rs"].contains(&name.as_str());
        assert!(minor || text.contains(&shown), "ARCHITECTURE.md does not name {shown}");
    }
}

/// Timers of the runtime count from now. A decision that needs a moment gets a `Moment`: the runtime's own clock stops in
/// suspend.
#[test]
fn time_is_read_in_one_file_only() {
    let mut sources = Vec::new();
    files(&root().join("crates/leasehold/src"), "rs", &mut sources);
    // The simulation is a test. It measures its own speed.
    sources.retain(|path| !path.ends_with("simulation/runner.rs"));
    for path in sources {
        let text = fs::read_to_string(&path).expect("a source");
        let production = text.split("#[cfg(test)]\nmod tests").next().expect("a first part");
        let is_clock = path.ends_with("src/clock.rs");
        for clock in ["SystemTime::now", "clock_gettime", "Instant"] {
            assert!(is_clock || !production.contains(clock), "{} reads {clock}", path.display());
        }
    }
}

/// Decisions take the time and events as arguments, so that the exploration and the simulation can drive them.
#[test]
fn decisions_read_no_clock_and_do_no_io() {
    let source = root().join("crates/leasehold/src");
    let mut pure = vec![source.join("lease/belief.rs")];
    files(&source.join("client"), "rs", &mut pure);
    files(&source.join("machine"), "rs", &mut pure);
    assert!(pure.len() > 6, "{pure:?}");
    for path in pure {
        let text = fs::read_to_string(&path).expect("a source");
        let production = text.split("#[cfg(test)]\nmod tests").next().expect("a first part");
        for impure in ["Moment::now", "wall_ms()\n", "getrandom", "Token::random", "tokio", "async fn", ".await"] {
            assert!(!production.contains(impure), "{} has `{}`", path.display(), impure.trim());
        }
    }
}

/// The files of the stores that read the boot clock: when a request leaves, how long a wait or a check took, and the
/// clock that SQLite's leases end by. All others get the time as an argument.
const STORE_CLOCKS: &[&str] = &[
    "memory.rs",
    "redis/checkup.rs",
    "redis/client/connection.rs",
    "redis/client/reconnect.rs",
    "redis/client/session.rs",
    "redis/push_probe.rs",
    "sqlite/boot.rs",
    "sqlite/displaced.rs",
    "sqlite/inbox.rs",
    "sqlite/schema.rs",
    "sqlite/serve.rs",
];

#[test]
fn few_files_of_the_stores_read_the_clock() {
    let stores = root().join("crates/leasehold/src/store");
    let mut sources = Vec::new();
    files(&stores, "rs", &mut sources);
    for path in sources {
        let text = fs::read_to_string(&path).expect("a source");
        let production = text.split("#[cfg(test)]\nmod tests").next().expect("a first part");
        let listed = STORE_CLOCKS.iter().any(|file| stores.join(file) == path);
        assert!(listed || !production.contains("Moment::now"), "{} reads the clock", path.display());
    }
}

#[test]
fn every_script_states_its_contract() {
    let mut scripts = Vec::new();
    files(&root().join("crates/leasehold/src/store/redis/lua"), "lua", &mut scripts);
    assert!(scripts.len() >= 8, "{scripts:?}");
    for path in scripts {
        let text = fs::read_to_string(&path).expect("a script");
        let head: String = text.lines().take_while(|line| line.starts_with("--")).collect();
        assert!(head.contains("KEYS"), "{} does not state its keys", path.display());
        assert!(!text.contains("'KEYS'"), "{} lists the whole server", path.display());
    }
}

#[test]
fn every_test_named_in_the_conformance_table_exists() {
    let mut tests = Vec::new();
    files(&root().join("crates"), "rs", &mut tests);
    files(&root().join("examples"), "rs", &mut tests);
    files(&root().join("python/tests"), "py", &mut tests);
    let tests: Vec<(PathBuf, String)> =
        tests.into_iter().map(|path| (path.clone(), fs::read_to_string(path).expect("a source"))).collect();
    let table = read("docs/conformance.md");
    for row in 1..=32 {
        assert_eq!(table.matches(&format!("\n| R{row:02} |")).count(), 1, "docs/conformance.md has R{row:02} once");
    }
    let mut checked = 0;
    for name in table.split('`').skip(1).step_by(2) {
        let Some((modules, test)) = name.rsplit_once("::") else { continue };
        if test == "*" || test == "tests" || test.is_empty() {
            continue;
        }
        let (function, python) = (format!("fn {test}("), format!("def {test}("));
        let module = modules.rsplit("::").find(|module| *module != "tests").expect("a module").trim_end_matches(".py");
        let in_module = |path: &Path| {
            let mut parts = path.iter().map(|part| part.to_string_lossy());
            parts.any(|part| part.split('.').next().is_some_and(|stem| stem.trim_end_matches("_tests") == module))
        };
        let exists = tests.iter().any(|(path, source)| {
            // A `*` matches a module that a macro makes.
            (module == "*" || in_module(path)) && (source.contains(&function) || source.contains(&python))
        });
        assert!(exists, "docs/conformance.md names {name}, which does not exist");
        checked += 1;
    }
    assert!(checked > 8, "only {checked}");
}

#[test]
fn every_link_in_the_documents_leads_somewhere() {
    let mut documents = vec!["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];
    let mut guides = Vec::new();
    files(&root().join("docs"), "md", &mut guides);
    let guides: Vec<String> =
        guides.iter().map(|path| format!("docs/{}", path.file_name().expect("a name").to_string_lossy())).collect();
    documents.extend(guides.iter().map(String::as_str));
    for document in documents {
        let text = read(document);
        let dir = Path::new(document).parent().expect("a parent");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = link.split('#').next().expect("a first part");
            if !target.is_empty() && !target.contains("://") {
                assert!(root().join(dir).join(target).exists(), "{document} links to {target}");
            }
        }
    }
}

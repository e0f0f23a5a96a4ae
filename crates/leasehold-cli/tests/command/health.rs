//! `doctor`, `journal`, `completions`, `man` and `--help`.

use std::fs;
use std::process::Command;

use crate::common::{Place, bare, ran};
use crate::run_support::wait_for;
use serde_json::{Value, json};

fn level<'a>(findings: &'a Value, check: &str) -> (&'a str, &'a str) {
    let found = findings.as_array().expect("a list").iter().find(|f| f["check"] == check);
    let found = found.unwrap_or_else(|| panic!("{check} is missing in {findings}"));
    (found["level"].as_str().expect("a level"), found["text"].as_str().expect("a text"))
}

fn doctor(place: &Place) -> (i32, Value) {
    let ran = place.run(&["doctor", "--json"]);
    (ran.code, serde_json::from_str(&ran.out).expect("JSON"))
}

#[test]
fn doctor_checks_the_file_and_its_directory() {
    let place = Place::sqlite();
    let (code, found) = doctor(&place);
    assert_eq!(code, 0, "{found}");
    for check in ["reachable", "filesystem", "permissions", "log", "integrity", "fences", "processes", "grant"] {
        assert_eq!(level(&found, check).0, "ok", "{found}");
    }
    let lines = place.ok(&["doctor"]);
    assert!(lines.lines().all(|line| ["ok  ", "warn", "bad "].contains(&&line[..4])), "{lines}");
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(place.home.path(), fs::Permissions::from_mode(0o777)).expect("set");
    assert_eq!(level(&doctor(&place).1, "permissions").0, "warn", "everybody can replace the file");
    fs::write(place.home.path().join("locks.db"), "x".repeat(5_000)).expect("written");
    let (code, found) = doctor(&place);
    assert_eq!((code, level(&found, "reachable").0), (1, "bad"), "{found}");
}

/// Returns what `doctor` reports about a file that it must reject.
fn refused(place: &Place, file: &str) -> String {
    let path = place.home.path().join(file);
    let store = format!("sqlite:{}", path.display());
    let ran = ran(bare(&["--store", &store, "doctor"]));
    assert_eq!((ran.code, ran.out.lines().count()), (1, 1), "{ran:?}");
    assert!(ran.out.starts_with("bad   reachable ") && ran.out.contains(path.to_str().expect("text")), "{ran:?}");
    // Other commands reject it, too.
    assert_eq!(self::ran(bare(&["--store", &store, "run", "a", "--", "true"])).code, 78);
    ran.out
}

#[test]
fn doctor_rejects_a_file_with_a_second_path() {
    let place = Place::sqlite();
    place.ok(&["run", "a", "--", "true"]);
    let at = |name: &str| place.home.path().join(name);
    fs::hard_link(at("locks.db"), at("hard.db")).expect("linked");
    let said = refused(&place, "hard.db");
    assert!(said.contains("hard links") && said.contains("find / -samefile"), "{said}");
    refused(&place, "locks.db");
    fs::remove_file(at("hard.db")).expect("removed");
    assert_eq!(doctor(&place).0, 0);

    fs::write(at("mounted.db"), "").expect("written");
    let mounted = Command::new("mount").arg("--bind").args([at("locks.db"), at("mounted.db")]).output();
    if !mounted.as_ref().is_ok_and(|done| done.status.success()) {
        println!("skipped: a file cannot be mounted here: {mounted:?}");
        return;
    }
    let said = std::panic::catch_unwind(|| refused(&place, "mounted.db"));
    let unmounted = Command::new("umount").arg(at("mounted.db")).status();
    assert!(unmounted.is_ok_and(|status| status.success()), "the mount is left behind");
    let said = said.expect("refused");
    assert!(said.contains("mount point") && said.contains("Mount the directory"), "{said}");
}

#[test]
fn a_copied_database_is_adopted_once_its_leases_have_ended() {
    let place = Place::sqlite();
    place.ok(&["acquire", "a", "--ttl", "3s"]);
    let copy = place.home.path().join("a copy.db");
    fs::copy(place.home.path().join("locks.db"), &copy).expect("copied");
    let said = refused(&place, "a copy.db");
    assert!(said.contains("does not belong to") && said.contains("a copy.db.alive"), "{said}");
    // Run the suggested command in a shell.
    let named = said.split('`').find(|part| part.starts_with("leasehold ")).expect("a command");
    let program = env!("CARGO_BIN_EXE_leasehold");
    let adopt = || {
        let mut shell = Command::new("sh");
        shell.args(["-c", &named.replacen("leasehold", "\"$0\"", 1), program]);
        ran(shell)
    };
    assert!(named.starts_with("leasehold --store ") && named.ends_with("doctor --adopt"), "{named}");
    let early = adopt();
    assert_eq!(early.code, 75, "{early:?}");
    assert!(early.err.contains("a copy.db cannot be adopted yet: 1 lease in it"), "{early:?}");
    refused(&place, "a copy.db");
    let adopted = wait_for("the end of its lease", || Some(adopt()).filter(|ran| ran.code != 75));
    assert_eq!(adopted.code, 0, "{adopted:?}");
    assert!(adopted.out.lines().all(|line| line.starts_with("ok  ")), "{adopted:?}");
    let store = format!("sqlite:{}", copy.display());
    assert_eq!(ran(bare(&["--store", &store, "run", "a", "--", "true"])).code, 0);
    // The original is unchanged.
    assert_eq!(doctor(&place).0, 0);
}

#[test]
fn only_a_database_that_exists_is_adopted() {
    let place = Place::sqlite();
    let missing = place.run(&["doctor", "--adopt"]);
    assert!(missing.code == 78 && missing.err.contains("there is no such database"), "{missing:?}");
    assert!(!place.home.path().join("locks.db").exists(), "nothing was made");
    let memory = ran(bare(&["--store", "memory:", "doctor", "--adopt"]));
    assert!(memory.code == 64 && memory.err.contains("SQLite"), "{memory:?}");
}

#[tokio::test]
async fn doctor_checks_the_redis_server() {
    let place = Place::redis().await;
    let server = place.server.as_ref().expect("a server");
    let (code, found) = doctor(&place);
    assert_eq!(code, 0, "{found}");
    for check in ["reachable", "role", "eviction", "clock", "permissions", "pushes", "fences", "grant"] {
        assert_eq!(level(&found, check).0, "ok", "{found}");
    }
    assert_eq!(level(&found, "persistence").0, "warn");

    server.command(&["CONFIG", "SET", "maxmemory-policy", "volatile-lru"]).await;
    assert_eq!(level(&doctor(&place).1, "eviction").0, "warn", "no limit yet");
    server.command(&["CONFIG", "SET", "maxmemory", "100mb"]).await;
    let (code, found) = doctor(&place);
    assert_eq!((code, level(&found, "eviction").0), (1, "bad"), "{found}");
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;

    server.command(&["ACL", "SETUSER", "few", "on", ">pw", "allkeys", "allchannels", "+@all", "-info", "-acl"]).await;
    server.command(&["ACL", "SETUSER", "none", "on", ">pw", "allkeys", "allchannels", "+@all", "-zpopmin"]).await;
    let of = |user: &str| Place {
        store: place.store.replace("redis://", &format!("redis://{user}:pw@")),
        home: tempfile::tempdir().expect("a directory"),
        server: None,
    };
    let (code, found) = doctor(&of("few"));
    assert_eq!(code, 0, "{found}");
    assert!(level(&found, "not checked").1.contains("INFO"), "{found}");
    assert_eq!(level(&found, "permissions").0, "warn");
    let (code, found) = doctor(&of("none"));
    let (state, text) = level(&found, "permissions");
    assert!(code == 1 && state == "bad" && text.contains("ZPOPMIN"), "{found}");

    server.command(&["SET", "lh1:fence", "9007199254740000"]).await;
    assert_eq!(doctor(&place).0, 1, "a counter above 2^52");
    server.kill9();
    let dead = place.run(&["doctor"]);
    assert_eq!((dead.code, dead.out.lines().count()), (1, 1), "{dead:?}");
    assert!(dead.out.starts_with("bad   reachable "), "{dead:?}");
}

#[tokio::test]
async fn the_journal_is_shown_replayed_and_settled_without_its_token() {
    let place = Place::redis().await;
    let empty = place.run(&["journal", "list"]);
    assert!(empty.code == 0 && empty.out.is_empty() && empty.err.contains("is empty"), "{empty:?}");
    assert_eq!(place.run(&["journal", "replay"]).code, 0);
    let token = place.ok(&["acquire", "stuck", "--ttl", "10m"]).lines().next().expect("a token").to_owned();
    let dir = place.home.path().join(".local/state/leasehold/journal");
    fs::create_dir_all(&dir).expect("made");
    let write = |id: &str, name: &str, store: &str| {
        let entry = json!({ "id": id, "kind": "unreleased", "name": name, "store": store, "namespace": "leasehold",
            "owner": "tts@h (pid 1)", "holder_id": "7f3a91c2b04d", "fence": 7, "ttl_ms": 600_000, "at_ms": 1_700_000_000_000_u64,
            "why": "the store cannot be reached", "token": token });
        fs::write(dir.join(format!("{id}.json")), entry.to_string()).expect("written");
    };
    write("1-a", "stuck", &place.store);
    write("2-b", "elsewhere\u{1b}[2J", "redis://other:6379");

    let said = [
        place.ok(&["journal", "list"]),
        place.ok(&["journal", "list", "--json"]),
        place.ok(&["journal", "show", "2-b"]),
        place.ok(&["journal", "show", "2-b", "--json"]),
    ];
    for text in said {
        assert!(text.contains("2-b") && !text.contains(&token) && !text.contains('\u{1b}'), "{text:?}");
    }
    let replayed = place.run(&["journal", "replay"]);
    assert!(replayed.code == 0 && replayed.err.contains("redis://other:6379"), "{replayed:?}");
    assert_eq!(place.json(&["why", "stuck"])["held"], false, "released by the replay");
    assert_eq!(place.json(&["journal", "list"]).as_array().expect("a list").len(), 1, "the other store's is left");
    assert_eq!(place.run(&["journal", "settle", "2-b"]).code, 64, "nobody to ask");
    assert_eq!(place.run(&["journal", "settle", "2-b", "--yes"]).code, 0);
    assert_eq!(place.json(&["journal", "list"]), json!([]));
}

#[test]
fn completions_and_manual_pages_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = ran(bare(&["completions", shell]));
        assert!(script.code == 0 && script.out.contains("doctor"), "{shell}");
    }
    assert!(ran(bare(&["man"])).out.starts_with(".ie"), "roff");
    let dir = tempfile::tempdir().expect("a directory");
    assert_eq!(ran(bare(&["man", "--out", dir.path().to_str().expect("text")])).code, 0);
    for page in ["leasehold.1", "leasehold-run.1", "leasehold-journal-settle.1"] {
        assert!(dir.path().join(page).exists(), "{page}");
    }
    assert!(!dir.path().join("leasehold-demo-worker.1").exists(), "hidden");
}

#[test]
fn help_has_examples_and_exits_with_0() {
    for command in ["run", "acquire", "renew", "release", "evict", "ls", "why"] {
        let help = ran(bare(&[command, "--help"]));
        assert!(help.code == 0 && help.err.is_empty() && help.out.contains("Examples:"), "{command}: {help:?}");
    }
    for args in [&["--help"][..], &["--version"], &["journal", "--help"], &["doctor", "--help"]] {
        let help = ran(bare(args));
        assert!(help.code == 0 && help.out.contains("leasehold"), "{args:?}");
    }
}

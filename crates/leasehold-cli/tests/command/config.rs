//! The configuration file: mistakes, effective values, and the commands that use it.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::{Place, Ran, bare, ran};

/// A typical configuration.
const WHOLE: &str = include_str!("../../../leasehold/src/config/tests/whole.yaml");
const OLDER: &str = include_str!("../../../leasehold/src/config/tests/older.yaml");

fn file(place: &Place, text: &str) -> PathBuf {
    let path = place.home.path().join("leasehold.yaml");
    std::fs::write(&path, text).expect("written");
    path
}

fn check(place: &Place, text: &str) -> Ran {
    let path = file(place, text);
    place.run(&["config", "check", path.to_str().expect("text")])
}

#[test]
fn config_check_reports_every_mistake_with_its_position() {
    let place = Place::sqlite();
    for text in ["", WHOLE, OLDER, "store: memory\nserver:\n  listen: 127.0.0.1:0\n  hosts: [a.example]\n"] {
        let checked = check(&place, text);
        assert_eq!((checked.code, checked.out.as_str()), (0, ""), "{text}: {checked:?}");
    }
    let wrong = "ttl: soon\nsever:\n  listen: x\nserver:\n  listen: nowhere\n  tls: {cert: c.pem}\n\
                 gpu_lock_monitor:\n  timeout_levels: {warning: 20m}\n  names: ['a*b']\n";
    let checked = check(&place, wrong);
    assert_eq!((checked.code, checked.err.as_str()), (78, ""), "{checked:?}");
    let at = place.home.path().join("leasehold.yaml").display().to_string() + ":";
    let lines: Vec<&str> = checked.out.lines().map(|line| line.strip_prefix(&at).expect("the file first")).collect();
    assert_eq!(
        lines,
        [
            "1:6: ttl: `soon` is not a duration: write seconds (2, 0.5) or a text such as 500ms, 30s, 5m or 1h30m",
            "9:10: gpu_lock_monitor.names: name \"a*b\" must be a text, with `*` at its end or not at all",
            "8:29: gpu_lock_monitor.timeout_levels.soft_timeout: must not come before `warning`",
            "6:15: server.tls.cert: is set without server.tls.key: set both",
            "5:11: server.listen: `nowhere` is not a valid address: write HOST:PORT, such as 127.0.0.1:8847",
            "2:1: sever is not known; did you mean server?",
        ]
    );
    let path = at.trim_end_matches(':');
    let objects: Value = serde_json::from_str(&place.run(&["config", "check", path, "--json"]).out).expect("JSON");
    assert_eq!((&objects[0]["line"], &objects[0]["column"], &objects[0]["file"]), (&json!(1), &json!(6), &json!(path)));
    let missing = place.run(&["config", "check", "/nowhere/locks.yaml"]);
    assert_eq!((missing.code, missing.out.lines().count()), (78, 1), "{missing:?}");
    assert!(missing.out.starts_with("/nowhere/locks.yaml: cannot be read: "), "{missing:?}");
}

#[test]
fn config_show_prints_effective_values_and_their_origins() {
    let place = Place::sqlite();
    let path = file(&place, "store: redis://u:hunter2@h:1\nnamespace: billing\nserver:\n  listen: 127.0.0.1:9\n");
    let path = path.to_str().expect("text");
    let show = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command: Command = bare(&[&["config", "show"], args].concat());
        command.envs(variables.iter().copied());
        ran(command)
    };
    let shown = show(&[path], &[("LEASEHOLD_NAMESPACE", "till"), ("LEASEHOLD_LISTEN", ""), ("LEASEHOLD_TTL", "")]);
    assert_eq!((shown.code, shown.err.as_str()), (0, ""), "{shown:?}");
    let line = |key: &str| {
        let found = shown.out.lines().find(|line| line.split_whitespace().next() == Some(key));
        found.unwrap_or_else(|| panic!("{key}: {shown:?}")).split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("store"), format!("redis://h:1 {path}:1:8"), "without its password");
    assert_eq!(line("namespace"), "till LEASEHOLD_NAMESPACE");
    assert_eq!(line("server.listen"), format!("127.0.0.1:9 {path}:4:11"), "a variable set to nothing is not set");
    assert_eq!(line("ttl"), "30s default");
    assert_eq!(line("gpu_lock_monitor.evict_living"), "false default");
    assert!(!shown.out.contains("hunter2"));

    let said = show(
        &["--json", "--store", "memory:"],
        &[("LEASEHOLD_CONFIG", path), ("LEASEHOLD_SERVER_LISTEN", "a:1"), ("LEASEHOLD_LISTEN", "b:2")],
    );
    let all: Value = serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{said:?}: {error}"));
    let of = |key: &str| all.as_array().expect("a list").iter().find(|one| one["key"] == key).expect("shown").clone();
    assert_eq!((&of("store")["value"], &of("store")["origin"]), (&json!("memory:"), &json!("flag")));
    assert_eq!((&of("namespace")["line"], &of("namespace")["file"]), (&json!(2), &json!(path)));
    assert_eq!(of("server.listen")["from"], "LEASEHOLD_SERVER_LISTEN");
    assert_eq!(of("server.tls.cert")["variable"], "LEASEHOLD_SERVER_TLS_CERT");

    let wrong = show(&[path], &[("LEASEHOLD_TTL", "soon"), ("LEASEHOLD_SERVER_LISEN", "x")]);
    assert_eq!((wrong.code, wrong.out.as_str(), wrong.err.lines().count()), (78, "", 2), "{wrong:?}");
    assert!(wrong.err.contains("LEASEHOLD_SERVER_LISTEN?"), "{wrong:?}");
    assert_eq!(show(&["--store", "somewhere"], &[]).code, 64);
}

#[test]
fn every_command_uses_the_given_configuration_file() {
    let place = Place::sqlite();
    let path = file(&place, &format!("store: {}\nnamespace: billing\nserver: {{listen: 'wrong'}}\n", place.store));
    let command = |args: &[&str]| {
        let mut command = bare(args);
        command.env("HOME", place.home.path()).env("LEASEHOLD_CONFIG", &path);
        ran(command)
    };
    let taken = command(&["acquire", "x", "--ttl", "1m"]);
    assert_eq!(taken.code, 0, "{taken:?}; the server's settings do not concern this command");
    let listed = place.json(&["ls", "--namespace", "billing"]);
    assert_eq!(listed[0]["name"], "x", "in the store and namespace of the file");
    assert_eq!(place.json(&["ls"]), json!([]));
    assert_eq!(command(&["ls", "--namespace", "other", "--json"]).out, "[]\n", "a flag wins");
    let mut elsewhere = bare(&["ls", "--json", "--config", path.to_str().expect("text")]);
    elsewhere.env("HOME", place.home.path()).env("LEASEHOLD_STORE", "memory:");
    assert_eq!(ran(elsewhere).out, "[]\n", "so does the environment");
    std::fs::write(&path, "store: redis://u:hunter2@h\nttl: soon\n").expect("written");
    let wrong = command(&["ls"]);
    assert_eq!((wrong.code, wrong.err.lines().count()), (78, 1), "{wrong:?}");
    assert!(wrong.err.contains("leasehold.yaml:2:6: ttl: ") && !wrong.err.contains("hunter2"), "{wrong:?}");
}

#[test]
fn serve_reports_why_it_cannot_start() {
    let place = Place::sqlite();
    let other = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = other.local_addr().expect("bound");
    let bad_keys = place.home.path().join("keys.txt");
    std::fs::write(&bad_keys, "{").expect("written");
    let bad_keys = bad_keys.display();
    let no_cert = place.home.path().join("cert.pem");
    std::fs::write(&no_cert, "-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n").expect("written");
    let no_cert = no_cert.display();
    let no_store = place.home.path().join("text");
    std::fs::write(&no_store, "this is no database, and longer than the header of one would be".repeat(4))
        .expect("written");
    let no_store = no_store.display();
    for (text, code, says) in [
        (format!("server: {{listen: '{taken}'}}"), 69, "is in use"),
        ("store: redis://127.0.0.1:1\nserver: {listen: '127.0.0.1:0'}".into(), 69, "redis://127.0.0.1:1"),
        ("server: {listen: '0.0.0.0:0'}".into(), 78, "no keys"),
        (format!("store: sqlite:{no_store}\nserver: {{listen: '127.0.0.1:0'}}"), 78, "text"),
        ("store: sqlite:/proc/nope/locks.db\nserver: {listen: '127.0.0.1:0'}".into(), 78, "/proc/nope"),
        (format!("server: {{listen: '127.0.0.1:0', tls: {{cert: {no_cert}, key: {no_cert}}}}}"), 78, "cert.pem"),
        (
            "server: {listen: '127.0.0.1:0', tls: {cert: /nowhere/c.pem, key: /nowhere/k.pem}}".into(),
            78,
            "/nowhere/c.pem",
        ),
        ("server: {listen: 'no.such.host.invalid:80'}".into(), 78, "not a valid address"),
        ("server: {listen: 5}".into(), 78, "leasehold.yaml:1:18: server.listen: "),
        (format!("server: {{keys: {bad_keys}}}"), 78, "is not a key file"),
        ("server: {keys: /nowhere/keys.json}".into(), 78, "/nowhere/keys.json"),
        ("server: {listen: '127.0.0.1:0', audit: /proc/nope/audit}".into(), 78, "/proc/nope/audit"),
        ("gpu_lock_monitor: {monitor_interval: 0}".into(), 78, "monitor_interval: must be longer than zero"),
        ("server: {listn: 'a:1'}".into(), 78, "did you mean server.listen?"),
    ] {
        let path = file(&place, &text);
        let mut command = bare(&["serve", "--config", path.to_str().expect("text")]);
        command.env("HOME", place.home.path());
        let ran = ran(command);
        assert_eq!((ran.code, ran.out.as_str(), ran.err.lines().count()), (code, "", 1), "{text}: {ran:?}");
        assert!(ran.err.contains(says), "{text}: {ran:?}");
    }
    // A disk that is full before the store exists, in a new user namespace, so that no privilege is needed.
    let disk = place.home.path().join("disk");
    std::fs::create_dir(&disk).expect("made");
    let script = "mount -t tmpfs -o size=64k none \"$1\" && { head -c 1000000 /dev/zero >\"$1/rest\" 2>/dev/null; exec \"$2\" serve --listen 127.0.0.1:0; }";
    let mut full = Command::new("unshare");
    full.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
    full.arg(&disk).arg(bare(&[]).get_program()).env("HOME", place.home.path());
    full.env("LEASEHOLD_STORE", format!("sqlite:{}", disk.join("locks.db").display()));
    let full = ran(full);
    if full.err.contains("unshare: ") {
        println!("not shown here, because this machine allows no namespaces: a full disk ({})", full.err.trim());
    } else {
        assert_eq!((full.code, full.err.lines().count()), (69, 1), "{full:?}");
        assert!(full.err.contains("disk") && full.err.contains("full"), "{full:?}");
    }
    let ran = place.run(&["serve", "--allow-host", "http://x"]);
    assert_eq!((ran.code, ran.err.contains("--allow-host")), (64, true), "{ran:?}");
}

//! Every usage error prints one line and has its exit code.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::common::{Place, Ran, bare, ran};

/// Expects one line on stderr, nothing on stdout, and an exit code.
fn refused(what: &str, ran: &Ran, code: i32, says: &str) {
    assert_eq!(ran.code, code, "{what}: {ran:?}");
    assert_eq!(ran.out, "", "{what}: stdout is data");
    assert_eq!(ran.err.lines().count(), 1, "{what}: {:?}", ran.err);
    assert!(ran.err.starts_with("leasehold: "), "{what}: {:?}", ran.err);
    assert!(ran.err.contains(says), "{what} does not say {says:?}: {:?}", ran.err);
}

#[test]
fn usage_errors_exit_with_64() {
    let token = "x".repeat(32);
    let long = "n".repeat(513);
    let cases: &[(&[&str], &str)] = &[
        (&[], "no command was given"),
        (&["frobnicate"], "frobnicate"),
        (&["journal"], "no command was given; see leasehold journal --help"),
        (&["run"], "<NAME>"),
        (&["run", "x"], "<CMD>"),
        (&["run", "x", "sleep", "5"], "write -- before the command"),
        (&["run", "--wiat", "5s", "x", "--", "true"], "--wait"),
        (&["run", "--wait", "5s", "--no-wait", "x", "--", "true"], "cannot be used with"),
        (&["run", "--ttl", "0s", "x", "--", "true"], "shorter than 50 ms"),
        (&["run", "--ttl", "30", "x", "--", "true"], "30 has no unit; write 30s"),
        (&["run", "--wait", "soon", "x", "--", "true"], "not a duration"),
        (&["run", "--on-lost", "shrug", "x", "--", "true"], "kill, warn"),
        (&["run", "-E", "300", "x", "--", "true"], "300"),
        (&["run", "two\nlines", "--", "true"], "control characters"),
        (&["once"], "<ID>"),
        (&["once", "x"], "<CMD>"),
        (&["once", "x", "sleep", "5"], "leasehold once ID --"),
        (&["once", "--forget", "x", "--", "true"], "cannot be used with"),
        (&["once", "--keep", "999ms", "x", "--", "true"], "shorter than 1 s"),
        (&["once", "--keep", "401d", "x", "--", "true"], "longer than 400 days"),
        (&["once", "--keep", "7", "x", "--", "true"], "7 has no unit; write 7s"),
        (&["once", &long[..508], "--", "true"], "longer than 507 bytes"),
        (&["once", "", "--", "true"], "is empty"),
        (&["once", "--grace", "20s", "x", "--", "true"], "--grace 20s is too long"),
        (&["claim"], "<ID>"),
        (&["claim", "x"], "<VALUE>"),
        (&["claim", "x", "v"], "--lease"),
        (&["claim", "x", "v", "--lease", "0s"], "shorter than 1 s"),
        (&["claim", "two\nlines", "v", "--lease", "1m"], "control characters"),
        (&["claim", &long, "v", "--lease", "1m"], "longer than 512 bytes"),
        (&["acquire"], "<NAME>"),
        (&["acquire", "x"], "--ttl <D>; see leasehold acquire --help"),
        (&["acquire", "x", "--ttl", "0s"], "shorter than 50 ms"),
        (&["acquire", "x", "--ttl", "25h"], "longer than 24 h"),
        (&["acquire", "x", "--ttl", "10"], "10 has no unit; write 10s"),
        (&["acquire", "", "--ttl", "10s"], "is empty"),
        (&["acquire", &long, "--ttl", "10s"], "longer than 512 bytes"),
        (&["acquire", "x", "--ttl", "10s", "--owner", "\u{1b}[2J"], "control characters"),
        (&["renew", "x"], "no token"),
        (&["renew", "x", "--token", "short"], "32 characters"),
        (&["release", "x", "--token", &"!".repeat(32)], "outside A-Z"),
        (&["release", "x", "--token", &token, "--token-file", "f"], "cannot be used with"),
        (&["release", "x", "--token-file", "/nonexistent/token"], "No such file"),
        (&["evict", "x"], "--yes"),
        (&["evict", "x", "--expect", "nonsense", "--yes"], "12 lower-case hex digits"),
        (&["why"], "<NAME>"),
        (&["why", "a\tb"], "control characters"),
        (&["ls", "a\nb"], "control characters"),
        (&["ls", "--namespace", "a b"], "namespace"),
        (&["journal", "show", "none"], "no entry none"),
        (&["journal", "settle", "none", "--yes"], "no entry none"),
        (&["completions", "tcsh"], "tcsh"),
    ];
    let place = Place::sqlite();
    for (args, says) in cases {
        refused(&format!("{args:?}"), &place.run(args), 64, says);
    }
    assert!(!place.home.path().join("locks.db").exists() || place.json(&["ls"]) == serde_json::json!([]));
}

#[test]
fn errors_never_contain_the_token() {
    let place = Place::sqlite();
    let almost = format!("{}!", "secret".repeat(5));
    let ran = place.run(&["release", "x", "--token", &almost]);
    assert!(ran.code == 64 && !ran.err.contains("secret"), "{ran:?}");
}

#[test]
fn an_unusable_store_exits_with_78() {
    let place = Place::sqlite();
    let dir = place.home.path().display();
    fs::write(place.home.path().join("text"), "not a database, but long enough to be mistaken for one".repeat(99))
        .expect("written");
    let cases = [
        ("foo://u:hunter2@host".to_owned(), "write sqlite, sqlite:PATH"),
        ("redis".to_owned(), "begins with redis://"),
        (format!("sqlite:{dir}"), "is not a file"),
        (format!("sqlite:{dir}/text"), "not a database"),
        ("sqlite:/proc/nope/locks.db".to_owned(), "/proc/nope"),
        ("redis://:hunter2@".to_owned(), "`redis://`: the host is missing"),
    ];
    for (store, says) in cases {
        for args in
            [&["ls"][..], &["why", "x"], &["acquire", "x", "--ttl", "5s"], &["claim", "x", "v", "--lease", "5s"]]
        {
            let ran = place.run(&[args, &["--store", &store]].concat());
            refused(&format!("{args:?} on {store}"), &ran, 78, says);
            assert!(!ran.err.contains("hunter2"), "{:?}", ran.err);
        }
    }
}

#[test]
fn invalid_environment_variables_exit_with_78() {
    let place = Place::sqlite();
    let mut command = place.command(&["ls"]);
    command.env("LEASEHOLD_NAMESPACE", "a:b");
    refused("namespace", &ran(command), 78, "namespace");
    let mut command = place.command(&["ls"]);
    command.env("LEASEHOLD_STORE", "nonsense");
    refused("store", &ran(command), 78, "write sqlite, sqlite:PATH");
}

#[test]
fn without_a_home_directory_there_is_no_default_store() {
    // No home is needed where all users share a directory.
    if std::path::Path::new("/var/lib/leasehold").is_dir() {
        return;
    }
    refused("no HOME", &ran(bare(&["ls"])), 78, "set HOME or XDG_STATE_HOME");
    let mut relative = bare(&["ls"]);
    relative.env("HOME", "somewhere");
    refused("a relative HOME", &ran(relative), 78, "set HOME or XDG_STATE_HOME");
    refused("no journal", &ran(bare(&["journal", "list"])), 78, "use --dir DIR");
}

#[test]
fn an_unreadable_store_exits_with_78() {
    let place = Place::sqlite();
    let locked = place.home.path().join("locked");
    fs::create_dir(&locked).expect("created");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o000)).expect("set");
    fs::set_permissions(place.home.path(), fs::Permissions::from_mode(0o755)).expect("set");
    // Root can read every file, so run as another user.
    let binary = place.home.path().join("leasehold");
    fs::copy(env!("CARGO_BIN_EXE_leasehold"), &binary).expect("copied");
    let store = format!("sqlite:{}/locks.db", locked.display());
    let args = ["ls", "--store", store.as_str()];
    let mut command = Command::new(&binary);
    if rustix::process::geteuid().is_root() {
        command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&binary);
    }
    refused(
        "unreadable",
        &ran({
            command.args(args);
            command
        }),
        78,
        "locked",
    );
}

#[test]
fn a_full_disk_exits_with_69() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=400k", "tmpfs"]).arg(dir.path());
    if !mount.output().is_ok_and(|out| out.status.success()) {
        println!("skipped: mounting a tmpfs needs root");
        return;
    }
    let store = format!("sqlite:{}/locks.db", dir.path().display());
    fs::write(dir.path().join("filler"), vec![7; 380 << 10]).expect("written");
    let refusal = ran(bare(&["acquire", "x", "--ttl", "5s", "--store", &store]));
    fs::remove_file(dir.path().join("filler")).expect("removed");
    let room = ran(bare(&["acquire", "x", "--ttl", "5s", "--store", &store]));
    let _ = Command::new("umount").arg("-l").arg(dir.path()).status();
    refused("full disk", &refusal, 69, "the disk is full");
    assert_eq!(room.code, 0, "with room again: {room:?}");
}

#[tokio::test]
async fn an_unreachable_server_exits_with_69_and_a_wrong_password_with_78() {
    let place = Place::redis().await;
    let server = place.server.as_ref().expect("a server");
    server.command(&["CONFIG", "SET", "requirepass", "right"]).await;
    refused("no password", &place.run(&["ls"]), 78, "password");
    let wrong = place.store.replace("redis://", "redis://:hunter2@");
    let ran = place.run(&["ls", "--store", &wrong]);
    refused("a wrong password", &ran, 78, "password");
    assert!(!ran.err.contains("hunter2"), "{ran:?}");
    server.kill9();
    for args in [
        &["ls"][..],
        &["why", "x"],
        &["acquire", "x", "--ttl", "5s"],
        &["evict", "x", "--yes"],
        &["claim", "x", "v", "--lease", "5s"],
        &["once", "x", "--", "true"],
    ] {
        refused(&format!("{args:?}"), &place.run(args), 69, "cannot be reached");
    }
}

#[test]
fn unwritable_output_exits_with_74_and_a_closed_pipe_with_0() {
    let place = Place::sqlite();
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    place.ok(&["acquire", "held", "--ttl", "1m"]);
    let mut command = place.command(&["ls"]);
    command.stdout(full());
    refused("ls > /dev/full", &ran(command), 74, "cannot write to stdout");
    // If the token cannot be printed, the lock is released.
    let mut command = place.command(&["acquire", "lost", "--ttl", "1m"]);
    command.stdout(full());
    refused("acquire > /dev/full", &ran(command), 74, "cannot write to stdout");
    assert_eq!(place.json(&["why", "lost"])["held"], false, "nobody has the token");
    let mut command = place.command(&["ls"]);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    command.stdout(writer);
    let ran = ran(command);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "ls | true");
}

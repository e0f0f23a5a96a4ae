//! `leasehold run`: exit codes, CMD's environment, messages, signals, and the release.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::run_support::{Ended, Job, World, is_alive, kill, wait_for};
use rustix::process::Signal;

#[test]
fn run_exits_with_the_commands_code() {
    let world = World::sqlite();
    std::fs::write(world.path("no-shebang"), "exit $1\n").expect("a file");
    std::fs::write(world.path("plain"), "exit 0\n").expect("a file");
    std::fs::set_permissions(world.path("no-shebang"), PermissionsExt::from_mode(0o755)).expect("a mode");
    let cases: [(&[&str], i32); 9] = [
        (&["true"], 0),
        (&["sh", "-c", "exit 3"], 3),
        (&["sh", "-c", "exit 255"], 255),
        (&["sh", "-c", "kill -9 $$"], 128 + 9),
        (&["sh", "-c", "kill -TERM $$"], 128 + 15),
        (&["sh", "-c", "kill -INT $$"], 128 + 2),
        (&["./no-shebang", "5"], 5),
        (&["no-such-program"], 127),
        (&["./plain"], 126),
    ];
    for (command, code) in cases {
        let ended = world.output(&[&["a", "--"], command].concat());
        assert_eq!(ended.code, Some(code), "{command:?}: {ended:?}");
        assert_eq!(ended.err.is_empty(), ![126, 127].contains(&code), "{command:?}: {}", ended.err);
        assert!(!world.is_held("a"), "{command:?} left the lock");
    }
}

#[test]
fn every_other_failure_has_its_exit_code_and_one_line() {
    let world = World::sqlite();
    let cases: [(&[&str], i32, &str); 8] = [
        (&["--store", "redis://127.0.0.1:1", "a", "--", "true"], 69, "127.0.0.1:1"),
        (&["--store", "nonsense:x", "a", "--", "true"], 78, "nonsense"),
        (&["--store", "sqlite:/proc/no/such/place.db", "a", "--", "true"], 78, "/proc/no"),
        (&["--ttl", "0s", "a", "--", "true"], 64, "--ttl"),
        (&["--ttl", "10s", "--grace", "6s", "a", "--", "true"], 64, "--grace"),
        (&["--owner", "", "a", "--", "true"], 64, "owner"),
        (&["a\nb", "--", "true"], 64, "control"),
        (&["a"], 64, "CMD"),
    ];
    for (args, code, says) in cases {
        let ended = world.output(args);
        assert_eq!(ended.code, Some(code), "{args:?}: {ended:?}");
        assert_eq!(ended.err.lines().count(), 1, "{args:?}: {}", ended.err);
        assert!(ended.err.starts_with("leasehold: ") && ended.err.contains(says), "{args:?}: {}", ended.err);
        assert!(ended.out.is_empty(), "{args:?}: {}", ended.out);
    }
}

#[test]
fn the_command_inherits_the_streams_and_gets_name_and_fence() {
    for world in World::all() {
        let script = "echo $LEASEHOLD_NAME; echo $LEASEHOLD_FENCE; cat; echo talk >&2";
        let mut job = world.run(&["order:42", "--", "sh", "-c", script]);
        let job = job.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut job = job.spawn().expect("it starts");
        job.stdin.take().expect("a pipe").write_all(b"through\n").expect("somebody reads");
        let ended = Ended::from(job.wait_with_output().expect("it ends"));
        let lines: Vec<&str> = ended.out.lines().collect();
        assert_eq!((lines[0], lines[2], lines.len()), ("order:42", "through", 3), "{ended:?}");
        assert!(lines[1].parse::<u64>().expect("a fence") > 1_000_000_000_000_000, "{ended:?}");
        assert_eq!(ended.err, "talk\n");
    }
}

#[test]
fn a_reader_notices_when_the_command_closes_its_output() {
    let world = World::sqlite();
    let mut command = world.run(&["a", "--", "sh", "-c", "echo out; exec >&-; read wait < pipe"]);
    rustix::fs::mkfifoat(rustix::fs::CWD, world.path("pipe"), rustix::fs::Mode::from_raw_mode(0o600)).expect("a pipe");
    let mut job = Job::start(command.stdout(Stdio::piped()));
    let mut out = String::new();
    job.0.stdout.take().expect("a pipe").read_to_string(&mut out).expect("its end, while the command runs");
    assert_eq!(out, "out\n");
    assert!(world.is_held("a"));
    std::fs::write(world.path("pipe"), "go\n").expect("somebody reads");
    assert_eq!(job.wait(), 0);
}

#[test]
fn no_wait_names_the_holder_and_the_store() {
    for world in World::all() {
        let mut holder =
            Job::start(&mut world.run(&["--owner", "backup", "a", "--", "sh", "-c", "echo >> in; sleep 60"]));
        world.lines("in", 1);
        let ended = world.output(&["--no-wait", "a", "--", "true"]);
        assert_eq!(ended.code, Some(75), "{ended:?}");
        let lines: Vec<&str> = ended.err.lines().collect();
        let pid = holder.pid().as_raw_nonzero();
        assert!(lines[0].starts_with("leasehold: a is held by backup@"), "{ended:?}");
        assert!(lines[0].contains(&format!("(pid {pid}) for ")) && lines[0].contains("lease ends in "), "{ended:?}");
        assert_eq!(lines[1], format!("  store: {} · see who waits: leasehold why a", world.url));
        assert_eq!(lines.len(), 2);

        let ended = world.output(&["--no-wait", "-E", "9", "a", "--", "true"]);
        assert_eq!((ended.code, ended.out.as_str()), (Some(9), ""));
        let ended = world.output(&["--wait", "200ms", "a", "--", "true"]);
        assert_eq!(ended.code, Some(75));
        assert!(ended.err.contains("; waited "), "{ended:?}");
        assert_eq!(world.waiters("a"), 0, "the queue is not empty");

        holder.signal(Signal::TERM);
        assert_eq!(holder.wait(), 128 + 15);
        assert!(!world.is_held("a"));
    }
}

#[test]
fn no_wait_with_json_prints_the_holder() {
    let world = World::sqlite();
    let _holder = Job::start(&mut world.run(&["--owner", "backup", "a", "--", "sh", "-c", "echo >> in; sleep 60"]));
    world.lines("in", 1);
    let ended = world.output(&["--json", "--no-wait", "a", "--", "true"]);
    assert_eq!(ended.code, Some(75));
    let lock: serde_json::Value = serde_json::from_str(&ended.out).expect("one object");
    assert_eq!((&lock["name"], &lock["held"]), (&"a".into(), &true.into()), "{lock}");
    assert!(lock["owner"].as_str().is_some_and(|owner| owner.starts_with("backup@")), "{lock}");
    assert!(lock.get("token").is_none() && lock["waiters"].is_array(), "{lock}");
    assert!(ended.err.starts_with("leasehold: a is held by"), "{ended:?}");
}

#[test]
fn signals_reach_the_command() {
    let world = World::sqlite();
    let script = "for s in HUP INT QUIT TERM USR1 USR2 ALRM WINCH; do trap \"echo $s >> got\" $s; done; \
                  : > got; echo >> in; while [ \"$(wc -l < got)\" != 8 ]; do sleep 0.01; done; exit 7";
    let mut job = Job::start(&mut world.run(&["a", "--", "sh", "-c", script]));
    world.lines("in", 1);
    let signals = [
        ("HUP", Signal::HUP),
        ("INT", Signal::INT),
        ("QUIT", Signal::QUIT),
        ("TERM", Signal::TERM),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
        ("ALRM", Signal::ALARM),
        ("WINCH", Signal::WINCH),
    ];
    for (sent, (name, signal)) in signals.into_iter().enumerate() {
        job.signal(signal);
        assert_eq!(world.lines("got", sent + 1)[sent], name);
    }
    assert_eq!(job.wait(), 7);
}

#[test]
fn ignored_signals_stay_ignored() {
    let world = World::sqlite();
    let inner = "echo >> in; while [ ! -e end ]; do sleep 0.01; done; exit 5";
    let script = format!("trap '' HUP; exec {} run a -- sh -c '{inner}'", env!("CARGO_BIN_EXE_leasehold"));
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]).current_dir(world.dir.path()).env("LEASEHOLD_STORE", &world.url);
    let mut job = Job::start(&mut command);
    world.lines("in", 1);
    job.signal(Signal::HUP);
    std::fs::write(world.path("end"), "").expect("a file");
    assert_eq!(job.wait(), 5, "ended by a signal that was to be ignored");
}

#[test]
fn a_signal_ends_the_wait_and_leaves_the_queue() {
    for world in World::all() {
        let _holder = Job::start(&mut world.run(&["a", "--", "sh", "-c", "echo >> in; sleep 60"]));
        world.lines("in", 1);
        for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
            let mut waiting = Job::start(&mut world.run(&["a", "--", "true"]));
            wait_for("a waiter", || (world.waiters("a") == 1).then_some(()));
            waiting.signal(signal);
            assert_eq!(waiting.wait(), -signal.as_raw());
            assert_eq!(world.waiters("a"), 0);
        }
    }
}

#[test]
fn background_processes_of_the_command_do_not_hold_the_lock() {
    for world in World::all() {
        let ended = world.output(&["a", "--", "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"]);
        let pid = ended.out.trim();
        assert_eq!(ended.code, Some(0));
        assert!(is_alive(pid), "a daemon may outlive its command");
        assert_eq!(world.output(&["--no-wait", "a", "--", "true"]).code, Some(0));
        kill(pid);
    }
}

#[test]
fn hold_at_least_keeps_the_lock_after_the_command() {
    for world in World::all() {
        let began = Instant::now();
        let ended = world.output(&["--hold-at-least", "600ms", "a", "--", "sh", "-c", "exit 4"]);
        assert_eq!(ended.code, Some(4), "{ended:?}");
        assert!(began.elapsed() >= Duration::from_millis(600));
        // A signal ends the hold; the exit code is still the command's.
        let mut job =
            Job::start(&mut world.run(&["--hold-at-least", "1h", "a", "--", "sh", "-c", "echo $$ >> in; exit 4"]));
        let pid = world.lines("in", 1).remove(0);
        wait_for("the command's end", || (!is_alive(&pid)).then_some(()));
        assert_eq!(world.output(&["--no-wait", "a", "--", "true"]).code, Some(75), "it holds on");
        job.signal(Signal::TERM);
        assert_eq!(job.wait(), 4);
        assert!(!world.is_held("a"));
    }
}

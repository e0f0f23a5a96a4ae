//! `leasehold once ID -- CMD` and `leasehold claim`: one call does the work, all calls get its result.

use std::process::{Command, Stdio};

use crate::run_support::{Ended, Job, World, keeper_of, wait_for};
use rustix::process::Signal;

fn once(world: &World, args: &[&str]) -> Command {
    let mut command = world.leasehold(&["once"]);
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn output(world: &World, args: &[&str]) -> Ended {
    Ended::of(&mut once(world, args))
}

#[test]
fn fifty_concurrent_calls_run_the_command_once_and_share_its_result() {
    for world in World::all() {
        let script = "echo ran >> ran; echo to stdout; printf 'to\\0stderr' >&2; sleep 0.3; exit 7";
        let args = ["migrate-7", "--", "sh", "-c", script];
        let started: Vec<_> = (0..50).map(|_| once(&world, &args).spawn().expect("it starts")).collect();
        for job in started {
            let ended = Ended::from(job.wait_with_output().expect("it ends"));
            assert_eq!((ended.code, ended.out.as_str(), ended.err.as_str()), (Some(7), "to stdout\n", "to\0stderr"));
        }
        assert_eq!(world.lines("ran", 1).len(), 1, "it ran once");
        // A later call gets the result at once, and no lock is held.
        let late = output(&world, &args);
        assert_eq!((late.code, late.out.as_str()), (Some(7), "to stdout\n"));
        assert!(!world.is_held("once:migrate-7") && world.lines("ran", 1).len() == 1);
    }
}

#[test]
fn when_the_runner_is_killed_the_next_call_runs_the_command() {
    for world in World::all() {
        for id in ["front", "keeper"] {
            let log = format!("ran-{id}");
            let script = format!("echo $$ >> {log}; [ $(wc -l < {log}) = 1 ] && sleep 600; echo done");
            let args = ["--ttl", "2s", id, "--", "sh", "-c", &script];
            let mut runner = Job::start(&mut once(&world, &args));
            world.lines(&log, 1);
            let waiters: Vec<_> = (0..3).map(|_| once(&world, &args).spawn().expect("it starts")).collect();
            wait_for("three in line", || (world.waiters(&format!("once:{id}")) == 3).then_some(()));
            // Kill the front or the keeper: the other one ends the command.
            if id == "keeper" {
                let keeper = keeper_of(runner.pid()).expect("a keeper");
                rustix::process::kill_process(keeper, Signal::KILL).expect("ours");
            } else {
                runner.signal(Signal::KILL);
            }
            for waiter in waiters {
                let ended = Ended::from(waiter.wait_with_output().expect("it ends"));
                assert_eq!((ended.code, ended.out.as_str()), (Some(0), "done\n"), "{ended:?}");
            }
            let ran = world.lines(&log, 2);
            assert_eq!(ran.len(), 2, "the next one ran it, and nobody else: {ran:?}");
            assert!(!crate::run_support::is_alive(&ran[0]), "what the first one ran is gone");
            runner.wait();
        }
    }
}

#[test]
fn a_command_ended_by_a_signal_has_no_result() {
    let world = World::sqlite();
    let script = "echo x >> ran; [ $(wc -l < ran) = 1 ] && kill -TERM $$; echo second";
    let first = output(&world, &["job", "--", "sh", "-c", script]);
    assert_eq!(first.code, Some(128 + 15), "{first:?}");
    let second = output(&world, &["job", "--", "sh", "-c", script]);
    assert_eq!((second.code, second.out.as_str()), (Some(0), "second\n"));
}

#[test]
fn a_failure_is_stored_except_with_until_ok() {
    let world = World::sqlite();
    let counting = |id: &str| format!("echo x >> {id}; echo $(wc -l < {id}); [ $(wc -l < {id}) -ge 2 ]");
    for _ in 0..2 {
        let ended = output(&world, &["stored", "--", "sh", "-c", &counting("stored")]);
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), "1\n"), "the failure is the result");
    }
    for (code, out) in [(1, "1\n"), (0, "2\n"), (0, "2\n")] {
        let ended = output(&world, &["--until-ok", "tried", "--", "sh", "-c", &counting("tried")]);
        assert_eq!((ended.code, ended.out.as_str()), (Some(code), out));
    }
}

#[test]
fn a_result_can_be_forgotten_and_expires() {
    let world = World::sqlite();
    let run = |args: &[&str]| output(&world, &[args, &["id", "--", "sh", "-c", "echo x >> ran; wc -l < ran"]].concat());
    assert_eq!(run(&["--keep", "1s"]).out.trim(), "1");
    wait_for("its end", || (run(&["--keep", "1h"]).out.trim() == "2").then_some(()));
    assert_eq!(run(&[]).out.trim(), "2");
    let forgotten = output(&world, &["--forget", "id"]);
    assert_eq!((forgotten.code, forgotten.err.as_str()), (Some(0), "id is forgotten\n"));
    assert_eq!(output(&world, &["--forget", "id"]).err, "id has no stored result\n");
    assert_eq!(run(&[]).out.trim(), "3");
}

#[test]
fn long_output_is_forwarded_completely_and_stored_truncated_with_a_note() {
    let world = World::sqlite();
    let args = ["large", "--", "sh", "-c", "head -c 1000000 /dev/zero; echo small >&2"];
    let first = output(&world, &args);
    assert_eq!((first.out.len(), first.err.as_str()), (1_000_000, "small\n"), "the runner sees all of it");
    let second = output(&world, &args);
    assert_eq!((second.code, second.out.len()), (Some(0), 480 * 1024));
    assert!(second.err.starts_with("small\n") && second.err.contains("491520 of the 1000000 bytes"), "{}", second.err);
}

#[test]
fn no_wait_reports_who_runs_the_command() {
    let world = World::sqlite();
    let mut runner =
        Job::start(&mut once(&world, &["--owner", "first", "job", "--", "sh", "-c", "echo >> up; exec sleep 600"]));
    world.lines("up", 1);
    let busy = output(&world, &["--no-wait", "-E", "9", "job", "--", "true"]);
    assert_eq!(busy.code, Some(9));
    assert!(busy.err.starts_with("leasehold: once:job is held by first@") && busy.out.is_empty(), "{busy:?}");
    // An interrupted run has no result.
    runner.signal(Signal::TERM);
    assert_eq!(runner.wait(), 128 + 15);
    assert_eq!(output(&world, &["--no-wait", "job", "--", "echo", "mine"]).out, "mine\n");
}

#[test]
fn a_command_that_cannot_be_started_leaves_nothing() {
    let world = World::sqlite();
    assert_eq!(output(&world, &["job", "--", "./nothing"]).code, Some(127));
    assert_eq!(output(&world, &["--no-wait", "job", "--", "echo", "mine"]).out, "mine\n");
    // A result that the library stored is not a command's result.
    world.with(async |locks| locks.once("other").run(async |_| 5).await.expect("done"));
    let refused = output(&world, &["other", "--", "true"]);
    assert!(refused.code == Some(78) && refused.err.contains("not the result of a command"), "{refused:?}");
}

#[test]
fn a_background_process_is_not_waited_for() {
    let world = World::sqlite();
    let ended = output(&world, &["job", "--", "sh", "-c", "sleep 600 & echo $! > pid; echo started"]);
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), "started\n"));
    let pid = world.lines("pid", 1).remove(0);
    assert!(crate::run_support::is_alive(&pid), "it lives on");
    crate::run_support::kill(&pid);
}

#[test]
fn claim_prints_the_bound_value() {
    for world in World::all() {
        let claim = |args: &[&str]| Ended::of(world.leasehold(&["claim"]).args(args));
        let first = claim(&["req-1", "job-a", "--lease", "1m"]);
        assert_eq!((first.code, first.out.as_str(), first.err.as_str()), (Some(0), "job-a\n", ""));
        let second = claim(&["req-1", "job-b", "--lease", "1m"]);
        assert_eq!((second.code, second.out.as_str()), (Some(0), "job-a\n"), "exit 0 either way");
        let json = |args: &[&str]| -> serde_json::Value {
            let ended = claim(&[args, &["--lease", "7d", "--json"]].concat());
            assert_eq!(ended.code, Some(0), "{ended:?}");
            serde_json::from_str(&ended.out).expect("JSON")
        };
        let (created, found) = (json(&["req-2", "-x"]), json(&["req-2", "y"]));
        assert_eq!((&created["created"], &created["value"]), (&true.into(), &"-x".into()));
        assert_eq!((&found["created"], &found["value"]), (&false.into(), &"-x".into()));
        assert!(
            created["claim_id"] == found["claim_id"] && found["claim_id"].as_str().is_some_and(|id| id.len() == 22)
        );
        // A value of another type is printed as JSON.
        let job = leasehold::bindings::JobBinding::new("j").on("n");
        let lease = std::time::Duration::from_secs(60);
        world.with(async |locks| locks.bindings().try_create("req-3", &job, lease).await.map(drop).expect("created"));
        assert_eq!(
            claim(&["req-3", "z", "--lease", "1m"]).out,
            "{\"dispatched\":false,\"job_id\":\"j\",\"node_id\":\"n\"}\n"
        );
    }
}

#[test]
fn twenty_concurrent_claims_get_the_same_value() {
    for world in World::all() {
        let start = |n: usize| {
            let mut command = world.leasehold(&["claim", "req", &n.to_string(), "--lease", "1m"]);
            command.stdout(Stdio::piped()).spawn().expect("it starts")
        };
        let started: Vec<_> = (0..20).map(start).collect();
        let said: Vec<String> =
            started.into_iter().map(|job| Ended::from(job.wait_with_output().expect("it ends")).out).collect();
        assert!(said.iter().all(|value| *value == said[0] && !value.is_empty()), "{said:?}");
    }
}

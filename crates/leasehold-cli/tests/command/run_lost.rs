//! `leasehold run`: when the lease is lost, the command and its descendants end before the lock can pass on.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::run_support::{Ended, Job, World, is_alive, wait_for};
use leasehold::inspect::EvictMode;

/// Ignores SIGTERM and starts a child in its own session that does, too. Writes both process ids.
const STUBBORN: &str = "trap '' TERM; setsid sh -c 'echo $$ >> pids; while :; do sleep 0.05; done' & \
                        echo $$ >> pids; while :; do sleep 0.05; done";

fn ended(job: Job) -> Ended {
    let mut job = job;
    let mut child = std::mem::replace(&mut job.0, std::process::Command::new("true").spawn().expect("true"));
    child.stdin.take();
    child.wait_with_output().expect("it ends").into()
}

fn start(world: &World, args: &[&str]) -> Job {
    Job::start(world.run(args).stdout(Stdio::piped()).stderr(Stdio::piped()))
}

#[test]
fn a_server_that_stops_answering_ends_the_command_in_time() {
    let world = World::redis();
    let job = start(&world, &["--ttl", "2s", "a", "--", "sh", "-c", STUBBORN]);
    let pids = world.lines("pids", 2);
    world.redis.as_ref().expect("a server").pause();
    let began = Instant::now();
    wait_for("the command's death", || pids.iter().all(|pid| !is_alive(pid)).then_some(()));
    let took = began.elapsed();
    assert!(took < Duration::from_secs(2), "still alive when the lease was over: {took:?}");
    let ended = ended(job);
    assert_eq!(ended.code, Some(76), "{ended:?}");
    assert!(ended.err.contains("the lease on a cannot be renewed and ends in"), "{ended:?}");
    println!("dead {took:?} after the server stopped, lease 2s");
}

#[test]
fn a_deleted_lock_is_noticed_at_the_next_renewal() {
    let world = World::redis();
    let job = start(
        &world,
        &[
            "--ttl",
            "3s",
            "a",
            "--",
            "sh",
            "-c",
            "trap 'echo >> asked; exit 0' TERM; echo >> in; \
                               while :; do sleep 0.01; done",
        ],
    );
    world.lines("in", 1);
    world.redis_command(&["FLUSHALL"]);
    let began = Instant::now();
    world.lines("asked", 1);
    let took = began.elapsed();
    assert!(took < Duration::from_millis(1_500), "a third of 3s, and half a second: {took:?}");
    let ended = ended(job);
    assert_eq!(ended.code, Some(76), "{ended:?}");
    assert!(ended.err.contains("the lease on a was lost"), "{ended:?}");
}

#[test]
fn a_database_that_is_removed_or_replaced_ends_the_command() {
    for replaced in [false, true] {
        let world = World::sqlite();
        let script = "trap 'echo >> asked; exit 0' TERM; echo >> in; while :; do sleep 0.01; done";
        let job = start(&world, &["--ttl", "3s", "a", "--", "sh", "-c", script]);
        world.lines("in", 1);
        if replaced {
            std::fs::write(world.path("new.db"), "").expect("written");
            std::fs::rename(world.path("new.db"), world.path("locks.db")).expect("replaced");
        } else {
            std::fs::remove_file(world.path("locks.db")).expect("removed");
        }
        let began = Instant::now();
        world.lines("asked", 1);
        let took = began.elapsed();
        assert!(took < Duration::from_secs(3), "before its lease was over: {took:?}");
        let ended = ended(job);
        assert_eq!(ended.code, Some(76), "{ended:?}");
        assert!(ended.err.contains("the lease on a was lost: the database file was removed or replaced"), "{ended:?}");
    }
}

#[test]
fn a_revoked_run_ends_its_command_and_hands_the_lock_on() {
    for world in World::all() {
        let job = start(&world, &["--ttl", "10s", "--grace", "300ms", "a", "--", "sh", "-c", STUBBORN]);
        let pids = world.lines("pids", 2);
        let next = start(&world, &["a", "--", "sh", "-c", "echo >> next"]);
        wait_for("a waiter", || (world.waiters("a") == 1).then_some(()));
        let began = Instant::now();
        world.with(async |locks| {
            let holder = locks.holder("a").await.expect("an answer").expect("held");
            locks.evict("a", holder.id, EvictMode::Revoke, "for a test").await.expect("revoked");
        });
        world.lines("next", 1);
        assert!(pids.iter().all(|pid| !is_alive(pid)), "two holders at once");
        assert!(began.elapsed() < Duration::from_secs(8), "by the release, not by the lease's end");
        assert_eq!(ended(job).code, Some(76));
        assert_eq!(ended(next).code, Some(0));
    }
}

#[test]
fn with_on_lost_warn_the_command_continues() {
    let world = World::redis();
    let script = "echo >> in; while [ ! -e end ]; do sleep 0.01; done; exit 6";
    let job = start(&world, &["--ttl", "1s", "--on-lost", "warn", "a", "--", "sh", "-c", script]);
    world.lines("in", 1);
    world.redis_command(&["FLUSHALL"]);
    wait_for("the lock to be free for others", || {
        (world.output(&["--no-wait", "a", "--", "true"]).code == Some(0)).then_some(())
    });
    std::thread::sleep(Duration::from_millis(700));
    std::fs::write(world.path("end"), "").expect("a file");
    let ended = ended(job);
    assert_eq!(ended.code, Some(6), "{ended:?}");
    assert!(ended.err.contains("goes on without the lock"), "{ended:?}");
}

#[test]
fn a_renewed_lease_outlives_many_ttls() {
    for world in World::all() {
        let ended = world.output(&["--ttl", "300ms", "a", "--", "sleep", "1.5"]);
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    }
}

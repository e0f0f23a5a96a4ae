//! `leasehold run` killed with SIGKILL: everything that its command started is dead before the next holder gets the lock.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::run_support::{Job, World, guardian_of, is_alive, keeper_of, kill, wait_for};
use leasehold_testkit::{full_or, report};
use rustix::process::{Pid, Signal, kill_process};

/// A background child, a child in its own session, and an orphan in that session that has closed all descriptors and cleared
/// its environment. Each writes its process id and ignores every signal that can be ignored.
pub(crate) const TREE: &str = "trap '' HUP INT TERM; echo $$ >> pids; \
    sh -c 'echo $$ >> pids; while :; do sleep 1; done' & \
    setsid sh -c 'echo $$ >> pids; while :; do sleep 1; done' & \
    (env -i setsid sh -c 'echo $$ >> pids; exec <&- >&- 2>&- 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; while :; do /bin/sleep 1; done' &) ; \
    while :; do sleep 1; done";

/// Writes the ids of the processes that are alive when the next holder gets the lock.
pub(crate) const NEXT: &str = "for pid in $(cat pids 2>/dev/null); do \
    s=$(sed 's/.*) //' /proc/$pid/stat 2>/dev/null | cut -c1); \
    case $s in ''|Z|X) ;; *) echo $pid >> alive;; esac; done; date +%s%N >> entered";

struct Kills {
    survivors: usize,
    longest: Duration,
}

/// Kills the front `count` times, at moments spread over start-up and run, while another run waits.
fn kill_often(world: &World, count: u32, victim: impl Fn(&Job) -> Pid) -> Kills {
    let mut kills = Kills { survivors: 0, longest: Duration::ZERO };
    for round in 0..count {
        for file in ["pids", "alive", "entered"] {
            let _ = std::fs::remove_file(world.path(file));
        }
        let mut job = Job::start(world.run(&["--ttl", "2s", "a", "--", "sh", "-c", TREE]).stderr(Stdio::null()));
        // Half of the kills fall into the first milliseconds, the others into the run.
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_micros(u64::from(round) * 7_919 % 12_000));
        } else {
            world.lines("pids", 1 + round as usize % 4);
        }
        let mut next = Job::start(&mut world.run(&["a", "--", "sh", "-c", NEXT]));
        if round % 4 == 1 {
            wait_for("a waiter", || (world.waiters("a") == 1).then_some(()));
        }
        let killed_at = Instant::now();
        kill_process(victim(&job), Signal::KILL).expect("nobody has waited for it yet");
        world.lines("entered", 1);
        kills.longest = kills.longest.max(killed_at.elapsed());
        assert_eq!(next.wait(), 0);
        job.wait();
        let alive = std::fs::read_to_string(world.path("alive")).unwrap_or_default();
        kills.survivors += alive.lines().count();
        let pids = std::fs::read_to_string(world.path("pids")).unwrap_or_default();
        for pid in pids.lines() {
            assert!(!is_alive(pid), "round {round}: {pid} outlived its runner for good");
            kill(pid);
        }
    }
    kills
}

#[test]
fn f39_nothing_outlives_a_killed_runner() {
    let count = full_or(12, 200);
    for (world, at_most) in [(World::sqlite(), Duration::from_secs(1)), (World::redis(), Duration::from_secs(3))] {
        let kills = kill_often(&world, count, Job::pid);
        let scheme = world.url.split(':').next().expect("a scheme");
        let (survivors, longest) = (kills.survivors, kills.longest);
        report(
            "F39",
            format!(
                "{survivors} alive when the next one entered, {count} kills on {scheme}, next one in after {longest:.1?} at most"
            ),
        );
        assert_eq!(survivors, 0);
        // The small run shares the machine with other tests.
        assert!(full_or(true, longest < at_most), "{scheme}: the next one waited for {longest:?}");
    }
}

#[test]
fn nothing_outlives_a_killed_keeper() {
    for world in World::all() {
        let kills = kill_often(&world, full_or(4, 40), |job| wait_for("a keeper", || keeper_of(job.pid())));
        assert_eq!(kills.survivors, 0);
    }
}

#[test]
fn a_killed_keeper_is_reported_as_a_lost_lease() {
    let world = World::sqlite();
    let mut job = Job::start(world.run(&["a", "--", "sh", "-c", TREE]).stderr(Stdio::null()));
    world.lines("pids", 4);
    kill_process(keeper_of(job.pid()).expect("a keeper"), Signal::KILL).expect("ours");
    assert_eq!(job.wait(), 76);
    for pid in world.lines("pids", 4) {
        assert!(!is_alive(&pid));
    }
}

#[test]
fn a_killed_waiter_leaves_the_queue() {
    for world in World::all() {
        let mut holder = Job::start(&mut world.run(&["a", "--", "sh", "-c", "echo >> in; sleep 60"]));
        world.lines("in", 1);
        let mut waiting = Job::start(&mut world.run(&["a", "--", "true"]));
        wait_for("a waiter", || (world.waiters("a") == 1).then_some(()));
        waiting.signal(Signal::KILL);
        waiting.wait();
        wait_for("an empty line", || (world.waiters("a") == 0).then_some(()));
        holder.signal(Signal::TERM);
        assert_eq!(holder.wait(), 128 + 15);
    }
}

/// SIGKILL to front, keeper and guardian at once leaves no process to clean up. On SQLite a surviving command keeps the
/// lock while it runs.
#[test]
fn a_command_that_survives_all_three_processes_keeps_the_lock() {
    use std::os::unix::process::CommandExt;
    let world = World::sqlite();
    let script = "setsid sh -c 'echo $$ >> pids; while :; do sleep 1; done' & wait";
    let mut command: Command = world.run(&["--ttl", "1h", "a", "--", "sh", "-c", script]);
    let mut job = Job::start(command.process_group(0));
    let pid = world.lines("pids", 1).remove(0);
    let keeper = keeper_of(job.pid()).expect("a keeper");
    let guardian = guardian_of(keeper).expect("a guardian");
    // None of them can react to another one's end.
    kill_process(guardian, Signal::STOP).expect("ours");
    rustix::process::kill_process_group(job.pid(), Signal::STOP).expect("ours");
    kill_process(guardian, Signal::KILL).expect("ours");
    rustix::process::kill_process_group(job.pid(), Signal::KILL).expect("ours");
    job.wait();
    assert_eq!(world.output(&["--wait", "300ms", "a", "--", "true"]).code, Some(75));
    assert!(is_alive(&pid));
    kill(&pid);
    // Its sleep keeps the lock for the second it runs.
    assert_eq!(world.output(&["--wait", "10s", "a", "--", "true"]).code, Some(0));
}

//! `leasehold run` under faults: output without a reader, processes killed together or stopped, a program that hangs
//! while it is started, and signals to the whole process group.

use std::io::{PipeReader, PipeWriter};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::run_killed::{NEXT, TREE};
use crate::run_support::{Job, World, guardian_of, is_alive, is_stopped, keeper_of, kill, wait_for};
use leasehold::inspect::EvictMode;
use leasehold_testkit::{full_or, report};
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// A fault while a command runs that ignores SIGTERM.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    /// The lease is revoked, and stdout and stderr have no reader.
    Unread,
    /// Front and keeper are killed.
    BothKilled,
    /// The whole process group is killed, and with it the front, the keeper and the command.
    GroupKilled,
    /// The keeper is stopped and does not renew.
    KeeperStopped,
    /// The whole process group is stopped, and with it the front, the keeper and the command.
    GroupStopped,
}

impl Trouble {
    const ALL: [Self; 5] = [Self::Unread, Self::BothKilled, Self::GroupKilled, Self::KeeperStopped, Self::GroupStopped];

    /// Injects the fault.
    fn strike(self, world: &World, job: &Job) {
        let keeper = keeper_of(job.pid()).expect("a keeper");
        match self {
            Self::Unread => revoke(world),
            Self::BothKilled => {
                job.signal(Signal::KILL);
                kill_process(keeper, Signal::KILL).expect("nobody has waited for it yet");
            }
            Self::GroupKilled => kill_process_group(job.pid(), Signal::KILL).expect("a group of its own"),
            Self::KeeperStopped => kill_process(keeper, Signal::STOP).expect("a keeper"),
            Self::GroupStopped => kill_process_group(job.pid(), Signal::STOP).expect("a group of its own"),
        }
    }

    /// Continues processes that were stopped, so that the front can end.
    fn pass(self, job: &Job) {
        if matches!(self, Self::GroupStopped) {
            job.signal(Signal::CONT);
        }
    }

    /// Returns the expected exit code.
    fn code(self) -> i32 {
        match self {
            Self::Unread | Self::KeeperStopped | Self::GroupStopped => 76,
            Self::BothKilled | Self::GroupKilled => -9,
        }
    }
}

fn revoke(world: &World) {
    world.with(async |locks| {
        let holder = locks.holder("a").await.expect("an answer").expect("held");
        locks.evict("a", holder.id, EvictMode::Revoke, "for a test").await.expect("revoked");
    });
}

/// Returns a full pipe.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let flags = fcntl_getfl(&writer).expect("flags");
    fcntl_setfl(&writer, flags | OFlags::NONBLOCK).expect("ours");
    for size in [4_096, 1] {
        while rustix::io::write(&writer, &vec![b'x'; size]).is_ok() {}
    }
    fcntl_setfl(&writer, flags).expect("ours");
    (reader, writer)
}

/// Runs one round. Returns the number of processes alive when the next holder entered.
fn survivors(world: &World, trouble: Trouble) -> usize {
    for file in ["pids", "alive", "entered"] {
        let _ = std::fs::remove_file(world.path(file));
    }
    let lease: &[&str] = match trouble {
        Trouble::Unread => &["--ttl", "2s", "--grace", "200ms"],
        _ => &["--ttl", "1s"],
    };
    let mut command = world.run(&[lease, &["a", "--", "sh", "-c", TREE]].concat());
    // Kept open and never read.
    let unread = matches!(trouble, Trouble::Unread).then(full_pipe);
    match &unread {
        Some((_, writer)) => {
            let end = || Stdio::from(writer.as_fd().try_clone_to_owned().expect("a second handle"));
            command.stdout(end()).stderr(end());
        }
        None => _ = command.stderr(Stdio::null()),
    }
    let mut job = Job::start(command.process_group(0));
    let pids = world.lines("pids", 4);
    let mut next = Job::start(&mut world.run(&["a", "--", "sh", "-c", NEXT]));
    wait_for("a waiter", || (world.waiters("a") == 1).then_some(()));
    trouble.strike(world, &job);
    world.lines("entered", 1);
    let alive = std::fs::read_to_string(world.path("alive")).unwrap_or_default().lines().count();
    for pid in pids {
        kill(&pid);
    }
    assert_eq!(next.wait(), 0);
    trouble.pass(&job);
    // In a run of its own: the kills above would change how it ends.
    if alive == 0 {
        assert_eq!(job.wait(), trouble.code(), "{trouble:?}");
    }
    alive
}

#[test]
fn f45_nothing_outlives_a_run_that_is_blocked_killed_or_stopped() {
    let rounds = full_or(1, 50);
    std::thread::scope(|scope| {
        for world in World::all() {
            scope.spawn(move || {
                let scheme = world.url.split(':').next().expect("a scheme");
                let each = Trouble::ALL.map(|trouble| (trouble, (0..rounds).map(|_| survivors(&world, trouble)).sum()));
                let alive: usize = each.iter().map(|(_, alive)| alive).sum();
                let count = rounds * each.len();
                report("F45", format!("{alive} alive when the next one entered, {count} rounds on {scheme}"));
                assert_eq!(alive, 0, "{scheme}: {each:?}");
            });
        }
    });
}

#[test]
fn a_killed_guardian_ends_the_run() {
    let world = World::sqlite();
    let mut job = Job::start(world.run(&["--ttl", "1h", "a", "--", "sh", "-c", TREE]).stderr(Stdio::null()));
    let pids = world.lines("pids", 4);
    let guardian = guardian_of(keeper_of(job.pid()).expect("a keeper")).expect("a guardian");
    kill_process(guardian, Signal::KILL).expect("a guardian");
    assert_eq!(job.wait(), 76);
    assert!(pids.iter().all(|pid| !is_alive(pid)));
    assert!(!world.is_held("a"));
}

#[test]
fn a_stopped_guardian_does_not_keep_a_command_alive_beyond_its_lease() {
    let world = World::redis();
    let mut job = Job::start(world.run(&["--ttl", "1s", "a", "--", "sh", "-c", TREE]).stderr(Stdio::null()));
    let pids = world.lines("pids", 4);
    let guardian = guardian_of(keeper_of(job.pid()).expect("a keeper")).expect("a guardian");
    kill_process(guardian, Signal::STOP).expect("a guardian");
    world.redis.as_ref().expect("a server").pause();
    let began = Instant::now();
    wait_for("the command's death", || pids.iter().all(|pid| !is_alive(pid)).then_some(()));
    assert!(began.elapsed() < Duration::from_secs(1), "still alive when the lease was over: {:?}", began.elapsed());
    assert_eq!(job.wait(), 76);
}

/// Holds `a` until the file `over` exists.
const FIRST: [&str; 4] = ["a", "--", "sh", "-c"];
const UNTIL_OVER: &str = "while [ ! -e over ]; do sleep 0.01; done";

/// The job is stopped while it waits. It is granted the lock, is revoked, its lease ends, and another process holds the lock
/// when the job is continued.
#[test]
fn if_the_lease_is_lost_before_the_start_the_command_is_not_started() {
    for world in World::all() {
        let mut first = Job::start(&mut world.run(&[&FIRST[..], &[UNTIL_OVER]].concat()));
        wait_for("the lock", || world.is_held("a").then_some(()));
        let waiting = ["--ttl", "1s", "a", "--", "sh", "-c", "echo >> started"];
        let mut job = Job::start(world.run(&waiting).stderr(Stdio::piped()));
        wait_for("a waiter", || (world.waiters("a") == 1).then_some(()));
        job.signal(Signal::TSTP);
        wait_for("the stop", || is_stopped(job.pid()).then_some(()));
        std::fs::write(world.path("over"), "").expect("a file");
        assert_eq!(first.wait(), 0);
        wait_for("the lock", || world.is_held("a").then_some(()));
        revoke(&world);
        world.with(async |locks| {
            let _inside = locks.lock("a").await.expect("the lease ends");
            job.signal(Signal::CONT);
            assert_eq!(job.wait(), 76);
        });
        assert!(!world.path("started").exists(), "{}: it ran beside another holder", world.url);
        let said = std::io::read_to_string(job.0.stderr.take().expect("piped")).expect("text");
        assert!(said.contains("was lost") && said.contains("was not started"), "{said}");
    }
}

/// Guardian and keeper are stopped around the start order. The lease is over when the guardian reads the order.
#[test]
fn a_guardian_that_is_continued_too_late_does_not_start_the_command() {
    let world = World::redis();
    let mut first = Job::start(&mut world.run(&[&FIRST[..], &[UNTIL_OVER]].concat()));
    wait_for("the lock", || world.is_held("a").then_some(()));
    // The command ignores SIGTERM from the start.
    let leasehold = world.leasehold(&[]);
    let run =
        format!("trap '' TERM; exec {} run --ttl 1s a -- sh -c 'echo >> started'", env!("CARGO_BIN_EXE_leasehold"));
    let mut command = Command::new("sh");
    command.args(["-c", &run]).current_dir(world.dir.path()).stderr(Stdio::null());
    command.envs(leasehold.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut job = Job::start(&mut command);
    wait_for("a waiter", || (world.waiters("a") == 1).then_some(()));
    let keeper = keeper_of(job.pid()).expect("a keeper");
    let guardian = guardian_of(keeper).expect("a guardian");
    kill_process(guardian, Signal::STOP).expect("a guardian");
    std::fs::write(world.path("over"), "").expect("a file");
    assert_eq!(first.wait(), 0);
    wait_for("the lock", || world.is_held("a").then_some(()));
    // The keeper does not renew, and the lease ends.
    kill_process(keeper, Signal::STOP).expect("a keeper");
    wait_for("the lease's end", || (!world.is_held("a")).then_some(()));
    kill_process(guardian, Signal::CONT).expect("a guardian");
    kill_process(keeper, Signal::CONT).expect("a keeper");
    assert_eq!(job.wait(), 76);
    assert!(!world.path("started").exists(), "it was started without a lease");
}

/// stderr has no reader while the store is down: the message waits, the grace period and the kill do not.
#[test]
fn the_grace_period_is_kept_while_stderr_is_blocked() {
    let world = World::sqlite();
    let (_reader, writer) = full_pipe();
    // A shell reports on stderr that its child was killed: not on ours.
    let script = "exec 2>/dev/null; trap 'echo >> asked; exit 0' TERM; echo >> in; while :; do sleep 0.01; done";
    let mut command = world.run(&["--ttl", "20s", "--grace", "9s", "a", "--", "sh", "-c", script]);
    let mut job = Job::start(command.stderr(Stdio::from(std::os::fd::OwnedFd::from(writer))));
    world.lines("in", 1);
    let began = Instant::now();
    revoke(&world);
    world.lines("asked", 1);
    assert_eq!(job.wait(), 76);
    assert!(began.elapsed() < Duration::from_secs(8), "it waited for its output: {:?}", began.elapsed());
    assert!(!world.is_held("a"));
}

/// Output is replayed and forwarded on separate threads: a signal ends a run whose output blocks.
#[test]
fn a_signal_ends_a_once_whose_output_is_blocked() {
    let world = World::sqlite();
    let (_reader, writer) = full_pipe();
    let script = "echo $$ >> pid; echo out; exit 3";
    let mut command = world.leasehold(&["once", "--ttl", "1s", "job", "--", "sh", "-c", script]);
    let mut job = Job::start(command.stdout(Stdio::from(std::os::fd::OwnedFd::from(writer))));
    let pid = world.lines("pid", 1).remove(0);
    wait_for("the command's end", || (!is_alive(&pid)).then_some(()));
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), 3, "the command's own code");
    // Its output is stored, although it was not read here.
    let mut again = world.leasehold(&["once", "job", "--", "false"]);
    let again = again.output().expect("it starts");
    assert_eq!((again.status.code(), &*again.stdout), (Some(3), &b"out\n"[..]));
}

/// Blocks every execution of a file until it is dropped.
struct Held(#[allow(dead_code, reason = "its descriptor holds them back")] Fanotify);

impl Held {
    /// Returns `None`, and prints a line, if that is not permitted.
    fn back(file: &std::path::Path) -> Option<Self> {
        let watch = Fanotify::init(InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC, EventFFlags::O_RDONLY);
        let marked = watch.and_then(|watch| {
            let nowhere: Option<&std::path::Path> = Some(file);
            watch.mark(MarkFlags::FAN_MARK_ADD, MaskFlags::FAN_OPEN_EXEC_PERM, rustix::fs::CWD, nowhere).map(|()| watch)
        });
        match marked {
            Ok(watch) => Some(Self(watch)),
            Err(error) => {
                println!("skipped: no start can be held back here: {error}");
                None
            }
        }
    }
}

#[test]
fn a_start_that_hangs_does_not_outlive_the_lease() {
    let world = World::redis();
    std::fs::copy("/bin/sleep", world.path("hangs")).expect("a copy");
    let Some(held) = Held::back(&world.path("hangs")) else { return };
    // The lease is renewed meanwhile, and a signal ends the run.
    let mut job = Job::start(&mut world.run(&["--ttl", "500ms", "a", "--", "./hangs", "60"]));
    wait_for("the lock", || world.is_held("a").then_some(()));
    assert_eq!(world.output(&["--wait", "900ms", "a", "--", "true"]).code, Some(75));
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), -Signal::TERM.as_raw());
    assert!(!world.is_held("a"));
    // So does a lease that cannot be renewed.
    let mut job = Job::start(world.run(&["--ttl", "1s", "a", "--", "./hangs", "60"]).stderr(Stdio::null()));
    wait_for("the lock", || world.is_held("a").then_some(()));
    let keeper = keeper_of(job.pid()).expect("a keeper");
    let guardian = guardian_of(keeper).expect("a guardian");
    world.redis.as_ref().expect("a server").pause();
    assert_eq!(job.wait(), 76);
    // The kernel needs a moment to end a thread that is executing a program.
    let guardian = guardian.as_raw_nonzero().to_string();
    wait_for("the guardian's end", || (!is_alive(&guardian)).then_some(()));
    drop(held);
}

/// Counts USR1 and USR2 without child processes, which could delay a trap.
const COUNTING: &str =
    "trap 'echo >> usr1' USR1; trap 'echo >> usr2' USR2; echo $$ >> pid; while [ ! -e end ]; do :; done";

#[test]
fn each_signal_reaches_the_command_once() {
    let world = World::sqlite();
    let mut command: Command = world.run(&["a", "--", "sh", "-c", COUNTING]);
    let mut job = Job::start(command.process_group(0));
    world.lines("pid", 1);
    for round in 0..10 {
        let (front, group): (Pid, Pid) = (job.pid(), job.pid());
        if round % 2 == 0 {
            kill_process_group(group, Signal::USR1).expect("a group of its own");
        } else {
            kill_process(front, Signal::USR1).expect("the front");
        }
        world.lines("usr1", round + 1);
        // Signals are forwarded in order: once this one has arrived, so have all earlier ones.
        kill_process(front, Signal::USR2).expect("the front");
        world.lines("usr2", round + 1);
        assert_eq!(world.lines("usr1", 1).len(), round + 1, "in round {round}");
    }
    std::fs::write(world.path("end"), "").expect("a file");
    assert_eq!(job.wait(), 0);
}

/// `pkill -f` and `start-stop-daemon --exec` signal each process of the run separately.
#[test]
fn a_signal_to_each_process_of_the_run_reaches_the_command_once() {
    let world = World::sqlite();
    let mut job = Job::start(&mut world.run(&["a", "--", "sh", "-c", COUNTING]));
    world.lines("pid", 1);
    let keeper = keeper_of(job.pid()).expect("a keeper");
    let guardian = guardian_of(keeper).expect("a guardian");
    for round in 1..=10 {
        for process in [job.pid(), keeper, guardian] {
            kill_process(process, Signal::USR1).expect("it lives");
        }
        world.lines("usr1", round);
        kill_process(job.pid(), Signal::USR2).expect("the front");
        world.lines("usr2", round);
        assert_eq!(world.lines("usr1", 1).len(), round);
    }
    std::fs::write(world.path("end"), "").expect("a file");
    assert_eq!(job.wait(), 0);
}

/// A command that has left the group does not receive signals to the group; the run forwards them.
#[test]
fn a_signal_to_the_group_reaches_a_command_that_left_it() {
    let world = World::sqlite();
    let mut command: Command = world.run(&["a", "--", "setsid", "sh", "-c", COUNTING]);
    let mut job = Job::start(command.process_group(0));
    world.lines("pid", 1);
    kill_process_group(job.pid(), Signal::USR1).expect("a group of its own");
    world.lines("usr1", 1);
    kill_process(job.pid(), Signal::USR2).expect("the front");
    world.lines("usr2", 1);
    assert_eq!(world.lines("usr1", 1).len(), 1);
    std::fs::write(world.path("end"), "").expect("a file");
    assert_eq!(job.wait(), 0);
}

/// In a cron job no process outside keeps the process group from being orphaned. The kernel sends SIGHUP to a group that
/// becomes orphaned while one of its members is stopped. A run must not cause that.
#[test]
fn the_end_of_a_command_does_not_hang_up_stopped_processes() {
    let world = World::sqlite();
    let script = "sleep 60 & kill -STOP $!; \"$@\"; code=$?; kill -KILL $!; exit $code";
    let mut run = Command::new("setsid");
    run.args(["-w", "sh", "-c", script, "sh"]);
    let within = world.run(&["a", "--", "sh", "-c", "sleep 0.2; exit 7"]);
    run.arg(within.get_program()).args(within.get_args()).current_dir(within.get_current_dir().expect("its own"));
    run.envs(within.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut job = Job::start(&mut run);
    assert_eq!(job.wait(), 7, "not hung up");
}

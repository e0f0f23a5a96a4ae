//! A pool shared by many processes, some of which are killed.

use std::time::{Duration, Instant};

use leasehold::LockManager;
use leasehold::pool::Pool;
use leasehold_testkit::history::Hold;
use leasehold_testkit::job::Job;
use leasehold_testkit::{Arena, History, Kind, WorkerProcess, full_or, report};
use serde_json::json;
use tempfile::TempDir;

const WORKER: &str = env!("CARGO_BIN_EXE_worker");
const LONG: Duration = Duration::from_secs(60);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A store, a manager for inspection, and a directory for the history.
struct World {
    arena: Arena,
    manager: LockManager,
    dir: TempDir,
}

impl World {
    async fn new(kind: Kind) -> Self {
        let arena = Arena::new(kind).await;
        let manager = arena.manager().await;
        Self { arena, manager, dir: tempfile::tempdir().expect("a directory") }
    }

    fn pool(&self, members: u32) -> Pool {
        self.manager.pool("gpu_lock", 0..members).expect("a pool")
    }

    fn job(&self, members: u32, count: usize) -> Job {
        let url = self.arena.url().expect("a store that processes can share");
        let mut job = Job::new(url, "gpu_lock", self.dir.path().to_owned());
        (job.members, job.count) = (members, count);
        job
    }

    /// Starts a process that waits, and holds once it is served.
    fn worker(&self, members: u32, count: usize) -> WorkerProcess {
        let mut job = self.job(members, count);
        job.hold = true;
        WorkerProcess::spawn(WORKER, &job)
    }

    /// Waits until the queue of a member has `wanted` waiters.
    async fn in_line(&self, pool: &Pool, index: usize, waiters: usize) {
        let waiting = async {
            while pool.status().await.expect("answered")[index].lock.waiters.len() != waiters {
                tokio::time::sleep(ms(1)).await;
            }
        };
        tokio::time::timeout(LONG, waiting).await.unwrap_or_else(|_| panic!("never {waiters} in line for {index}"));
    }

    /// Checks that there are no holders and no waiters.
    async fn nothing_left(&self, pool: &Pool) {
        let empty = async {
            loop {
                let held = self.manager.list("", None, 10).await.expect("answered").locks;
                let waiters: usize = pool.status().await.expect("answered").iter().map(|m| m.lock.waiters.len()).sum();
                if held.is_empty() && waiters == 0 {
                    return;
                }
                tokio::time::sleep(ms(5)).await;
            }
        };
        tokio::time::timeout(LONG, empty).await.expect("nothing is left");
    }
}

/// Returns the members that a worker was granted.
async fn granted(worker: &mut WorkerProcess) -> Vec<u64> {
    let line = worker.wait_for_line(|line| line["granted"].is_array(), LONG).await.expect("granted");
    line["granted"].as_array().expect("a list").iter().map(|index| index.as_u64().expect("a number")).collect()
}

/// 200 tasks in 4 processes on 4 members: never two on one member (and so never more than four holders), in order.
async fn many_tasks_in_four_processes(kind: Kind) {
    let world = World::new(kind).await;
    let cycles = full_or(4, 20);
    let mut workers: Vec<WorkerProcess> = (0..4)
        .map(|_| {
            let mut job = world.job(4, 1);
            (job.tasks, job.cycles, job.inside_us, job.on_go) = (50, cycles, 1_000, true);
            WorkerProcess::spawn(WORKER, &job)
        })
        .collect();
    for worker in &mut workers {
        worker.wait_for_line(|line| line["ready"] == true, LONG).await.expect("ready");
    }
    let began = Instant::now();
    workers.iter_mut().for_each(|worker| worker.send_line("go"));
    for worker in &mut workers {
        worker.wait_for_line(|line| line["done"] == true, LONG).await.expect("done in time");
    }
    let took = began.elapsed();
    let history = History::read(world.dir.path()).expect("a history");
    assert!(history.overlaps().is_empty(), "two on one: {:?}", history.overlaps());
    assert!(history.fence_inversions().is_empty(), "{:?}", history.fence_inversions());
    let mut holds: Vec<Hold> = history.holds().into_iter().flat_map(|(_, holds)| holds).collect();
    assert_eq!(holds.len(), 200 * cycles, "everybody was served");
    assert_eq!(history.holds().len(), 4, "all members were used");
    holds.sort_by_key(|hold| hold.granted_ns);
    // In the order of requests no task is served twice while another waits. The exception is the start: before the last task
    // has drawn its ticket, some are done and send their next request.
    let most = served_meanwhile(&holds);
    assert!(most <= 200 + 100, "{most} were served while one of 200 waited");
    world.nothing_left(&world.pool(4)).await;
    let rate = holds.len() as f64 / took.as_secs_f64();
    let text = format!(
        "{kind:?}: {} permits of 4 members by 200 tasks in 4 processes, 0 overlaps, {rate:.0}/s, at most {most} served while one waited",
        holds.len()
    );
    report("pools", text);
}

/// Returns the largest number of grants between a task's request and its own grant.
fn served_meanwhile(holds: &[Hold]) -> usize {
    let since = |hold: &Hold| holds.partition_point(|other| other.granted_ns < hold.asked_ns.expect("recorded"));
    holds.iter().enumerate().map(|(place, hold)| place - since(hold)).max().unwrap_or(0)
}

/// Waiters in processes of their own: the first waiter is killed, then a holder.
async fn killed_waiters_and_holders(kind: Kind) {
    let world = World::new(kind).await;
    let pool = world.pool(2);
    let mut holders = [world.worker(2, 1), world.worker(2, 1)];
    for holder in &mut holders {
        granted(holder).await;
    }
    let mut waiters = Vec::new();
    for number in 1..=3 {
        waiters.push(world.worker(2, 1));
        for index in [0, 1] {
            world.in_line(&pool, index, number).await;
        }
    }
    waiters[0].kill9();
    let began = Instant::now();
    holders[0].send_line("release");
    granted(&mut waiters[1]).await;
    let past_the_dead = began.elapsed();
    assert!(past_the_dead < Duration::from_secs(2), "the dead waiter held things up for {past_the_dead:?}");
    holders[1].kill9();
    let began = Instant::now();
    granted(&mut waiters[2]).await;
    let after_the_holder = began.elapsed();
    // Its lease is 2 s; SQLite notices its death.
    let at_most = if kind == Kind::Sqlite { ms(1_500) } else { ms(3_500) };
    assert!(after_the_holder < at_most, "{after_the_holder:?}");
    for waiter in &mut waiters[1..] {
        waiter.send_line("release");
        waiter.wait_for_line(|line| line["done"] == true, LONG).await.expect("done");
    }
    world.nothing_left(&pool).await;
    let text = format!(
        "{kind:?}: past a killed waiter in {past_the_dead:.1?}, after a killed holder in {after_the_holder:.1?}"
    );
    report("pools", text);
}

/// A process that collects several members is killed while it holds some: the next request gets them.
async fn a_killed_collector(kind: Kind) {
    let world = World::new(kind).await;
    let pool = world.pool(3);
    let held =
        [pool.acquire().await.expect("free"), pool.acquire().await.expect("free"), pool.acquire().await.expect("free")];
    // The ttl of the request does not matter: members are collected on short leases.
    let mut job = world.job(3, 2);
    (job.hold, job.ttl_ms) = (true, 60_000);
    let mut collector = WorkerProcess::spawn(WORKER, &job);
    world.in_line(&pool, 2, 1).await;
    let mut next = world.worker(3, 2);
    let stands_next = async {
        while world.manager.info("gpu_lock:collecting").await.expect("answered").waiters.is_empty() {
            tokio::time::sleep(ms(1)).await;
        }
    };
    tokio::time::timeout(LONG, stands_next).await.expect("waits for its turn");
    let [first, second, third] = held;
    first.release().await.expect("answered");
    let has_a_part = async {
        loop {
            let holder = world.manager.holder("gpu_lock:0").await.expect("answered").expect("handed on");
            if holder.owner.task() == "worker-0" {
                return;
            }
        }
    };
    tokio::time::timeout(LONG, has_a_part).await.expect("it has a part");
    collector.kill9();
    let began = Instant::now();
    second.release().await.expect("answered");
    let got = granted(&mut next).await;
    let took = began.elapsed();
    assert_eq!(got, [0, 1]);
    let at_most = if kind == Kind::Sqlite { ms(2_500) } else { Duration::from_secs(8) };
    assert!(took < at_most, "{took:?}");
    drop(third);
    next.send_line("release");
    let line = next.wait_for_line(|line| !line["released"].is_null(), LONG).await.expect("released");
    assert_eq!(line, json!({ "task": 0, "released": true }));
    world.nothing_left(&pool).await;
    report("pools", format!("{kind:?}: after a killed collector in {took:.1?}"));
}

mod redis {
    use super::Kind::Redis;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn many_tasks_in_four_processes() {
        super::many_tasks_in_four_processes(Redis).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn killed_waiters_and_holders() {
        super::killed_waiters_and_holders(Redis).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_killed_collector() {
        super::a_killed_collector(Redis).await;
    }
}

mod sqlite {
    use super::Kind::Sqlite;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn many_tasks_in_four_processes() {
        super::many_tasks_in_four_processes(Sqlite).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn killed_waiters_and_holders() {
        super::killed_waiters_and_holders(Sqlite).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_killed_collector() {
        super::a_killed_collector(Sqlite).await;
    }
}

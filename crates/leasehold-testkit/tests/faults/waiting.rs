//! A thousand waiters for one lock: their cost, and that of dead and stopped waiters.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use leasehold::{Guard, LockManager};
use leasehold_testkit::history::{EventKind as Happened, Hold, now_ns};
use leasehold_testkit::{RedisServer, WorkerProcess, full_or, report};
use redis::Value;

use crate::common::*;

const QUEUE: &str = "lh1:queue:leasehold:lock:crowd";
/// The limit within which every waiter is served.
const ALL_SERVED: Duration = Duration::from_secs(240);

/// Processes that wait for one lock, its holder, and the order of the queue.
struct Crowd<'a> {
    server: &'a RedisServer,
    looker: LockManager,
    chronicle: Chronicle,
    workers: Vec<WorkerProcess>,
    first: Option<Guard>,
    /// The queue, as pairs of process and task.
    line: Vec<(u32, u64)>,
}

impl<'a> Crowd<'a> {
    async fn gather(server: &'a RedisServer, processes: usize, managers: usize) -> Self {
        let looker = connect(&server.url()).await;
        let chronicle = Chronicle::new();
        let first = looker.lock("crowd").ttl(ms(30_000)).no_wait().await.expect("free");
        chronicle.granted(0, &first);
        let mut job = chronicle.job(&server.url(), "crowd");
        (job.managers, job.on_go, job.linger) = (managers, true, true);
        job.wait_ms = u64::try_from(ALL_SERVED.as_millis()).expect("some minutes");
        let mut workers: Vec<_> = (0..processes).map(|_| WorkerProcess::spawn(WORKER, &job)).collect();
        for (i, worker) in workers.iter_mut().enumerate() {
            worker.wait_for_line(|line| line["ready"] == true, LONG).await.expect("ready");
            worker.send_line("go");
            let all = i64::try_from((i + 1) * managers).expect("few");
            while server.command(&["ZCARD", QUEUE]).await != Value::Int(all) {
                tokio::time::sleep(ms(5)).await;
            }
        }
        let waiters = looker.info("crowd").await.expect("answered").waiters;
        let who = |owner: &leasehold::Owner| {
            let task = owner.task().strip_prefix("worker-").and_then(|task| task.parse().ok());
            (owner.pid(), task.expect("a worker"))
        };
        let line = waiters.iter().map(|waiter| who(&waiter.owner)).collect();
        Self { server, looker, chronicle, workers, first: Some(first), line }
    }

    /// Releases the first hold and waits until every living waiter was served. Returns the holds in order.
    async fn serve(&mut self) -> Vec<Hold> {
        let first = self.first.take().expect("held until now");
        self.chronicle.ends(0, &first, Happened::ReleaseCalled);
        assert!(first.release().await.expect("answered"));
        for worker in &mut self.workers {
            worker.wait_for_line(|line| line["served"] == true, ALL_SERVED).await.expect("served");
        }
        let history = self.chronicle.check();
        let mut all = history.holds();
        assert_eq!(all.len(), 1, "one lock");
        all.remove(0).1
    }

    /// Checks that waiters were served in the order of the queue, without the dead ones.
    fn assert_in_order(&self, holds: &[Hold], dead: &[u32]) {
        let served: Vec<_> = holds.iter().skip(1).map(|hold| (hold.pid, hold.task)).collect();
        let expected: Vec<_> = self.line.iter().copied().filter(|(pid, _)| !dead.contains(pid)).collect();
        assert_eq!(served.len(), expected.len(), "everybody alive was served");
        let wrong = served.iter().zip(&expected).filter(|(a, b)| a != b).count();
        assert_eq!(wrong, 0, "{wrong} of {} out of order", served.len());
    }

    async fn disperse(mut self) {
        self.workers.iter_mut().for_each(|worker| worker.send_line("end"));
        for worker in &mut self.workers {
            worker.wait_for_line(|line| line["done"] == true, LONG).await.expect("done");
        }
        assert_no_keys_left(self.server).await;
        self.looker.shutdown().await;
    }
}

/// Counts the commands of clients at the server: requests and push probes.
struct Monitor {
    requests: Arc<AtomicU64>,
    echoes: Arc<AtomicU64>,
    stream: TcpStream,
}

impl Monitor {
    fn start(server: &RedisServer) -> Self {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port())).expect("the server is there");
        stream.write_all(b"MONITOR\r\n").expect("sent");
        let (requests, echoes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let mut lines = BufReader::new(stream.try_clone().expect("a second handle"));
        let mut ok = String::new();
        lines.read_line(&mut ok).expect("answered");
        assert!(ok.starts_with("+OK"), "{ok}");
        let (all, echoed) = (requests.clone(), echoes.clone());
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                if line.contains(" lua] ") {
                    continue;
                }
                let echo = line.contains("\"SPUBLISH\"") && line.contains(" \"E ");
                if echo { &echoed } else { &all }.fetch_add(1, Relaxed);
            }
        });
        Self { requests, echoes, stream }
    }
}

impl Monitor {
    /// Returns the numbers of requests and push probes.
    fn sent(&self) -> u64 {
        self.requests.load(Relaxed) + self.echoes.load(Relaxed)
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// Returns the number of commands, including those of scripts and without those of the test.
async fn commands(server: &RedisServer) -> u64 {
    let ours = ["info", "zcard", "monitor", "slowlog|get", "slowlog|reset", "config|resetstat", "keys"];
    server.commandstats().await.iter().filter(|(name, _)| !ours.contains(&name.as_str())).map(|(_, calls)| calls).sum()
}

/// The cost of waiting and hand-offs.
struct Cost {
    /// Per hand-off: requests of clients without push probes, and commands including those of scripts.
    requests: f64,
    commands: f64,
    /// Per second without hand-offs: requests of clients including push probes, and commands.
    idle_requests: f64,
    idle_commands: f64,
}

async fn cost(server: &RedisServer, processes: usize, managers: usize) -> Cost {
    let mut crowd = Crowd::gather(server, processes, managers).await;
    let monitor = Monitor::start(server);
    // In a full run, long enough for every waiter to send its request twice.
    let idle = full_or(5.0, 60.0);
    let before = (monitor.sent(), commands(server).await);
    tokio::time::sleep(Duration::from_secs_f64(idle)).await;
    let idle_requests = (monitor.sent() - before.0) as f64 / idle;
    let idle_commands = (commands(server).await - before.1) as f64 / idle;
    server.command(&["CONFIG", "RESETSTAT"]).await;
    let (requests, echoes) = (monitor.requests.load(Relaxed), monitor.echoes.load(Relaxed));
    let holds = crowd.serve().await;
    let hand_offs = holds.len() as f64 - 1.0;
    let all = commands(server).await;
    let (requests, echoes) = (monitor.requests.load(Relaxed) - requests, monitor.echoes.load(Relaxed) - echoes);
    drop(monitor);
    crowd.assert_in_order(&holds, &[]);
    crowd.disperse().await;
    let commands = all.saturating_sub(echoes) as f64 / hand_offs;
    Cost { requests: requests as f64 / hand_offs, commands, idle_requests, idle_commands }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f34_a_hand_off_costs_the_same_however_many_wait() {
    let server = RedisServer::start().await;
    let few = cost(&server, 2, 5).await;
    let (processes, managers) = full_or((4, 50), (8, 125));
    let many = cost(&server, processes, managers).await;
    let waiters = processes * managers;
    let figures = format!(
        "per hand-off with 10 waiting {:.1} requests, {:.1} commands; with {waiters} {:.1} and {:.1}; \
         {waiters} that wait send {:.0} requests/s ({:.0} commands/s inside scripts too)",
        few.requests, few.commands, many.requests, many.commands, many.idle_requests, many.idle_commands
    );
    assert!(few.requests <= 3.0 && many.requests <= 3.0, "{figures}");
    assert!(few.commands <= 20.0 && many.commands <= 20.0, "{figures}");
    // 500 for a thousand waiters; the eight nearest to the head cost the same for any length of the queue.
    let idle = 100.0 + 0.4 * waiters as f64;
    assert!(many.idle_requests <= idle && many.idle_commands <= idle, "{figures}; {idle} allowed");
    report("F34", figures);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f34_the_dead_cost_less_than_a_second_in_all() {
    let server = RedisServer::start().await;
    let (processes, managers) = full_or((4, 50), (8, 125));
    let mut crowd = Crowd::gather(&server, processes, managers).await;
    server.command(&["SLOWLOG", "RESET"]).await;
    // Every other one, so that living waiters are behind dead ones.
    let mut dead = Vec::new();
    for worker in crowd.workers.iter_mut().step_by(2) {
        crowd.chronicle.kill(worker);
        dead.push(worker.pid());
    }
    crowd.workers.retain(|worker| !dead.contains(&worker.pid()));
    let holds = crowd.serve().await;
    crowd.assert_in_order(&holds, &dead);
    // The gaps in which all waiters of a process were skipped.
    let gaps = holds.windows(2).filter(|pair| pair[0].pid != pair[1].pid);
    let cost: u64 = gaps.map(|pair| pair[1].granted_ns - pair[0].until_ns).sum();
    let cost = Duration::from_nanos(cost);
    assert!(cost < ms(1_000), "the dead cost {cost:?}");
    let slowest = server.slowest_script_us().await;
    assert!(slowest <= 5_000, "a script took {slowest} µs");
    crowd.disperse().await;
    let (gone, live) = (dead.len() * managers, holds.len() - 1);
    report(
        "F34",
        format!(
            "{gone} of {} killed: {live} served in order, the dead cost {cost:.1?} in all, slowest script {slowest} µs",
            gone + live
        ),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f34_a_stopped_process_costs_two_and_a_half_seconds_at_most() {
    let server = RedisServer::start().await;
    let mut costs = Vec::new();
    for _ in 0..full_or(1, 5) {
        let mut crowd = Crowd::gather(&server, 3, 1).await;
        crowd.workers[0].pause();
        wait_until_stopped(crowd.workers[0].pid()).await;
        let first = crowd.first.take().expect("held until now");
        crowd.chronicle.ends(0, &first, Happened::ReleaseCalled);
        let released = now_ns();
        assert!(first.release().await.expect("answered"));
        for worker in &mut crowd.workers[1..] {
            worker.wait_for_line(|line| line["served"] == true, LONG).await.expect("served");
        }
        crowd.workers[0].resume();
        crowd.workers[0].wait_for_line(|line| line["served"] == true, LONG).await.expect("served at last");
        let history = crowd.chronicle.check();
        let holds = history.holds().remove(0).1;
        let order: Vec<u32> = holds.iter().skip(1).map(|hold| hold.pid).collect();
        let pids: Vec<u32> = crowd.line.iter().map(|(pid, _)| *pid).collect();
        assert_eq!(order, [pids[1], pids[2], pids[0]], "the stopped one comes last, the others in order");
        costs.push(Duration::from_nanos(holds[1].granted_ns.saturating_sub(released)));
        crowd.disperse().await;
    }
    assert!(longest(&costs) <= ms(2_500), "{}", spread(&costs));
    report("F34", format!("a stopped process cost {}", spread(&costs)));
}

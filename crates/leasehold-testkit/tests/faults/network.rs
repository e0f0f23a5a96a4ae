//! Networks and servers that stop replying, and pushes that do not arrive.

use std::future::IntoFuture;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use leasehold::{Error, LockManager, LossReason};
use leasehold_testkit::history::{EventKind as Happened, now_ns};
use leasehold_testkit::{FaultProxy, RedisServer, WorkerProcess, full_or, report};

use crate::common::*;

/// Runs a call that gets no reply. Returns by how much it exceeded its deadline.
async fn by<T>(deadline: Duration, call: impl Future<Output = Result<T, Error>>) -> Duration {
    let began = Instant::now();
    assert!(call.await.is_err(), "nobody was there to answer");
    began.elapsed().saturating_sub(deadline)
}

/// Runs one process through a silence of its server. Returns the results as text.
async fn through_silence(url: &str, silence: impl AsyncFn(bool), lasts: Duration) -> String {
    let manager = connect(url).await;
    let answer_within = options().request_timeout;
    let short = manager.lock("short").ttl(TTL).no_wait().await.expect("free");
    let long = manager.lock("long").ttl(ms(30_000)).no_wait().await.expect("free");
    let given_back = manager.lock("given-back").ttl(ms(30_000)).no_wait().await.expect("free");
    // So that nothing else happens when the short lease ends.
    tokio::time::sleep(ms(300)).await;
    let metronome = Metronome::start();
    silence(true).await;
    let began = Instant::now();
    let told = async {
        let why = short.lost().await;
        let told = Duration::from_nanos(now_ns());
        assert_eq!(why, LossReason::Expired);
        told.abs_diff(Duration::from_nanos(until_ns(&short)))
    };
    let overruns = async {
        let (a, b, c, d, e, f) = tokio::join!(
            by(answer_within, manager.try_lock("tried")),
            by(ms(1_000), manager.lock("waited").wait_up_to(ms(1_000)).into_future()),
            by(ms(3_000), manager.lock("waited-longer").wait_up_to(ms(3_000)).into_future()),
            by(answer_within, long.extend(ms(30_000))),
            by(answer_within, given_back.release()),
            by(answer_within, manager.holder("long")),
        );
        [a, b, c, d, e, f]
    };
    let (off, overruns) = tokio::join!(told, overruns);
    let stall = metronome.longest_stall();
    assert!(off <= ms(50) + stall, "told {off:?} off its end, the machine stalled for {stall:?}");
    let over = longest(&overruns);
    assert!(over <= OVERRUN + stall, "K4: {overruns:?}, the machine stalled for {stall:?}");
    tokio::time::sleep(lasts.saturating_sub(began.elapsed())).await;
    silence(false).await;
    let back = Instant::now();
    loop {
        match manager.lock("after").ttl(TTL).no_wait().await {
            Ok(guard) => break assert!(guard.release().await.expect("answered")),
            Err(Error::Store { .. }) => assert!(back.elapsed() < ms(2_000), "not back after two seconds"),
            Err(other) => panic!("{other}"),
        }
    }
    let recovered = back.elapsed();
    assert!(recovered <= ms(2_000), "{recovered:?}");
    assert!(long.is_valid() && long.loss().is_none(), "a lease longer than the silence is kept");
    long.extend(ms(30_000)).await.expect("renewed again");
    assert!(long.release().await.expect("answered"));
    assert!(!short.release().await.expect("answered"), "it ended in the silence");
    // Requests during the silence are undone, and releases have taken effect.
    let mut gone = Duration::ZERO;
    for name in ["tried", "waited", "waited-longer", "given-back"] {
        while manager.is_locked(name).await.expect("answered") {
            assert!(back.elapsed() < Duration::from_secs(12), "`{name}` is still held");
            tokio::time::sleep(ms(5)).await;
        }
        gone = back.elapsed();
    }
    format!(
        "told {off:.1?} from its end, overrun at most {over:.0?} (the machine stalled for {stall:.0?}), back after {recovered:.0?}, clean after {gone:.1?}"
    )
}

/// Returns the CPU time of all threads of a process, in nanoseconds.
fn cpu_ns(pid: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let of = |thread: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
        stat.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0)
    };
    threads.flatten().map(of).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f27_a_stopped_server_delays_no_call_beyond_its_deadline() {
    let server = RedisServer::start().await;
    let lasts = full_or(ms(5_000), ms(10_000));
    // A holder that ignores its loss, to check that a loss costs nothing.
    let chronicle = Chronicle::new();
    let mut job = chronicle.job(&server.url(), "stubborn");
    job.stubborn = true;
    let worker: WorkerProcess = holding_worker(&job).await;
    let idle = async {
        tokio::time::sleep(lasts - ms(1_200)).await;
        let before = cpu_ns(worker.pid());
        tokio::time::sleep(ms(1_000)).await;
        Duration::from_nanos(cpu_ns(worker.pid()) - before)
    };
    let silence = async |on: bool| if on { server.pause() } else { server.resume() };
    let url = server.url();
    let (figures, busy) = tokio::join!(through_silence(&url, silence, lasts), idle);
    assert!(busy < ms(200), "a process that lost its lease ran for {busy:?} of a second");
    drop(worker);
    report("F27", format!("SIGSTOP for {lasts:?}: {figures}; cpu of a lost holder {busy:.0?}/s"));
}

/// A server behind a virtual cable that can be pulled: packets are dropped without a reset.
struct Cable {
    namespace: String,
    device: String,
    peer: String,
    server: Option<Child>,
    address: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Cable {
    /// Returns `None` if this process lacks the permission.
    async fn lay() -> Option<Self> {
        if !is_root() {
            return None;
        }
        let id = std::process::id();
        let (low, high) = (u8::try_from(id % 200).ok()?, u8::try_from(id / 200 % 200).ok()?);
        let (near, far) = (
            Ipv4Addr::new(198, 18 + (low & 1), high, low & !3 | 1),
            Ipv4Addr::new(198, 18 + (low & 1), high, low & !3 | 2),
        );
        let mut cable = Self {
            namespace: format!("lh{id}"),
            device: format!("lha{id}"),
            peer: format!("lhb{id}"),
            server: None,
            address: SocketAddr::from((far, 6379)),
            _dir: tempfile::tempdir().ok()?,
        };
        let (ns, a, b) = (cable.namespace.clone(), cable.device.clone(), cable.peer.clone());
        let laid = ip(&["netns", "add", &ns])
            && ip(&["link", "add", &a, "type", "veth", "peer", "name", &b, "netns", &ns])
            && ip(&["addr", "add", &format!("{near}/30"), "dev", &a])
            && ip(&["-n", &ns, "addr", "add", &format!("{far}/30"), "dev", &b])
            && ip(&["link", "set", &a, "up"])
            && ip(&["-n", &ns, "link", "set", &b, "up"]);
        if !laid {
            return None;
        }
        let binary = std::env::var_os("LEASEHOLD_TEST_SERVER").unwrap_or_else(|| "redis-server".into());
        let server = Command::new("ip")
            .args(["netns", "exec", &ns])
            .arg(binary)
            .args([
                "--bind",
                &far.to_string(),
                "--port",
                "6379",
                "--protected-mode",
                "no",
                "--save",
                "",
                "--appendonly",
                "no",
            ])
            .arg("--dir")
            .arg(cable._dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        cable.server = Some(server.ok()?);
        let there = async {
            while LockManager::connect_with(&cable.url(), options()).await.is_err() {
                tokio::time::sleep(ms(5)).await;
            }
        };
        tokio::time::timeout(LONG, there).await.expect("the server answers");
        Some(cable)
    }

    fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// At the far end, so that this side keeps its route and notices nothing.
    fn pull(&self, out: bool) {
        let state = if out { "down" } else { "up" };
        assert!(ip(&["-n", &self.namespace, "link", "set", &self.peer, state]));
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
        ip(&["link", "del", &self.device]);
        ip(&["netns", "del", &self.namespace]);
    }
}

fn ip(args: &[&str]) -> bool {
    Command::new("ip").args(args).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f27_a_silent_network_delays_no_call_beyond_its_deadline() {
    let lasts = full_or(ms(5_000), ms(10_000));
    let (how, figures) = match Cable::lay().await {
        Some(cable) => {
            let silence = async |on: bool| cable.pull(on);
            ("a pulled cable", through_silence(&cable.url(), silence, lasts).await)
        }
        None => {
            let server = RedisServer::start().await;
            let proxy = FaultProxy::in_front_of(&server);
            let silence = async |on: bool| proxy.blackhole(on);
            ("a proxy that forwards nothing", through_silence(&proxy.url(), silence, lasts).await)
        }
    };
    report("F27", format!("{how} for {lasts:?}: {figures}"));
}

/// Hands a lock back and forth between a manager without faults and one with faults. Returns how long each hand-off took.
async fn to_and_fro(
    direct: LockManager,
    troubled: LockManager,
    name: String,
    times: usize,
    chronicle: Arc<Chronicle>,
) -> Vec<Duration> {
    let mut took = Vec::new();
    for turn in 0..times {
        let guard = direct.lock(name.as_str()).ttl(TTL).wait_up_to(LONG).await.expect("its turn");
        chronicle.granted(0, &guard);
        let waiting = tokio::spawn({
            let request = troubled.lock(name.as_str()).ttl(TTL).wait_up_to(LONG);
            async move { (request.await.expect("its turn"), Instant::now()) }
        });
        wait_for_waiters(&direct, &name, 1).await;
        // Of different lengths, so that the faults come at every moment of it.
        tokio::time::sleep(ms(20 + u64::try_from(turn).expect("few") * 37 % 110)).await;
        chronicle.ends(0, &guard, Happened::ReleaseCalled);
        let released = Instant::now();
        assert!(guard.release().await.expect("answered"));
        let (next, entered) = tokio::time::timeout(LONG, waiting).await.expect("nobody is stuck").expect("no panic");
        took.push(entered.saturating_duration_since(released));
        chronicle.granted(0, &next);
        chronicle.ends(0, &next, Happened::ReleaseCalled);
        // If it is interrupted, the release continues in the background.
        let _ = next.release().await;
    }
    took
}

async fn hand_offs(
    trouble: impl Future<Output = ()> + Send + 'static,
    proxy: &FaultProxy,
    server: &RedisServer,
) -> Vec<Duration> {
    let (lanes, each) = full_or((10, 6), (20, 15));
    let mut pairs = Vec::new();
    for _ in 0..lanes {
        pairs.push((connect(&server.url()).await, connect(&proxy.url()).await));
    }
    let metronome = Metronome::start();
    let trouble = tokio::spawn(trouble);
    let (mut tasks, mut chronicles) = (Vec::new(), Vec::new());
    for (lane, (direct, troubled)) in pairs.into_iter().enumerate() {
        let chronicle = Arc::new(Chronicle::new());
        chronicles.push(chronicle.clone());
        tasks.push(tokio::spawn(to_and_fro(direct, troubled, format!("lane-{lane}"), each, chronicle)));
    }
    let mut took = Vec::new();
    for task in tasks {
        took.extend(task.await.expect("no panic"));
    }
    trouble.abort();
    proxy.heal();
    for chronicle in chronicles {
        chronicle.check();
    }
    assert_no_keys_left(server).await;
    let stall = metronome.longest_stall();
    assert!(longest(&took) <= ms(1_100) + stall, "{}, the machine stalled for {stall:?}", spread(&took));
    took
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f29_without_messages_every_hand_off_takes_about_a_second_at_most() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let mute = proxy.clone();
    let trouble = async move {
        // In the middle: the first waiter without a push does not know yet that none arrive.
        tokio::time::sleep(ms(50)).await;
        mute.mute_pushes(true);
    };
    let took = hand_offs(trouble, &proxy, &server).await;
    report("F29", format!("muted: {} hand-offs, {}", took.len(), spread(&took)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f29_with_connections_cut_every_fifth_of_a_second_no_waiter_is_stuck() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let cuts = Arc::new(AtomicBool::new(false));
    let trouble = {
        let (proxy, cuts) = (proxy.clone(), cuts.clone());
        async move {
            loop {
                tokio::time::sleep(ms(200)).await;
                cuts.fetch_or(proxy.reset_pushing_connections() > 0, SeqCst);
            }
        }
    };
    let took = hand_offs(trouble, &proxy, &server).await;
    assert!(cuts.load(SeqCst), "connections were cut");
    report("F29", format!("cut every 200 ms: {} hand-offs, {}", took.len(), spread(&took)));
}

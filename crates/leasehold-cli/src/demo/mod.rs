//! `leasehold demo`: a server on a temporary store, a dozen worker processes, and failures that are explained as they
//! happen. Everything is removed at the end.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use leasehold::LockManager;
use leasehold::inspect::Holder;
use leasehold_server::{Server, Settings};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

mod worker;

pub(crate) use worker::{Workload, work};

use crate::cli::{DemoArgs, Global};
use crate::duration::shown;
use crate::exit::{Exit, Failure};
use crate::serve::{serve_failure, shutdown_signal};
use crate::store::Choice;
use crate::{duration, output};

/// The owner name and the workload of each worker.
const WORKERS: [(&str, Workload); 12] = [
    ("tts-worker-1", Workload::Gpu),
    ("tts-worker-2", Workload::Gpu),
    ("tts-worker-3", Workload::Gpu),
    ("ocr-worker-1", Workload::Gpu),
    ("ocr-worker-2", Workload::Gpu),
    ("checkout-1", Workload::Order),
    ("checkout-2", Workload::Order),
    ("checkout-3", Workload::Order),
    ("report-1", Workload::Report),
    ("report-2", Workload::Report),
    ("pricing-1", Workload::Cache),
    ("pricing-2", Workload::Cache),
];
/// The time between two failures.
const PAUSE: Duration = Duration::from_secs(8);
/// The default address of the dashboard, if it is free.
const LISTEN: &str = "127.0.0.1:8847";
/// How long a worker hangs: two ttls, so it has lost its lock by then.
const HANG: Duration = Duration::from_secs(12);
/// A GPU that is held longer than this raises an alert.
const ALERT_AFTER: Duration = Duration::from_secs(7);
/// The interval at which the store is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs the demo for the given time, or until SIGTERM or SIGINT.
pub(crate) fn demo(args: &DemoArgs, json: bool) -> Result<Exit, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| Failure::new(Exit::Unreachable, format!("cannot start the runtime: {error}")))?;
    runtime.block_on(async {
        // First: a signal must not leave files behind.
        let interrupted = shutdown_signal()?;
        let temp = TempStore::new().map_err(|error| {
            let dir = std::env::temp_dir();
            Failure::new(Exit::Unreachable, format!("cannot write to {}: {error}", dir.display()))
        })?;
        let (listener, address) = listen(args.listen.as_deref()).await?;
        let locks = temp.choice()?.connect_with(temp.options()?).await?;
        let mut settings = Settings::default();
        settings.audit = Some(temp.dir.join("audit.jsonl"));
        // Shorter intervals than a real server's, so that they can be watched.
        settings.monitor.enabled = true;
        settings.monitor.monitor_interval = Duration::from_secs(1);
        settings.monitor.timeout_levels.warning = ALERT_AFTER;
        let mut workers = Workers { workers: Vec::new(), url: temp.url() };
        for (name, workload) in WORKERS {
            workers.start(name, workload)?;
        }
        let url = format!("http://{address}");
        if json {
            output::json(&json!({ "url": url, "store": locks.store() }))?;
        }
        introduce(&url, args.lasts);
        let began = Instant::now();
        let scenario = async {
            let over = tokio::time::timeout(args.lasts, run_scenario(&mut workers, &locks, &url, began));
            tokio::select! {
                played = over => played.unwrap_or(Ok(())),
                () = interrupted => Ok(()),
            }
        };
        let (outcome, done) = (tokio::sync::Mutex::new(Ok(())), tokio_util::sync::CancellationToken::new());
        let server = Server::new(locks.clone(), settings);
        let ended = done.clone();
        let serving = server.run(listener, async move { ended.cancelled().await });
        let running = async {
            *outcome.lock().await = scenario.await;
            done.cancel();
        };
        let (served, ()) = tokio::join!(serving, running);
        workers.kill_all();
        locks.shutdown().await;
        served.map_err(serve_failure)?;
        outcome.into_inner()?;
        output::message("the demo is over; its processes and files are removed");
        Ok(Exit::Done)
    })
}

fn introduce(url: &str, lasts: Duration) {
    output::message(&format!("open {url}"));
    output::message(&format!(
        "  Twelve workers share {} GPUs, four orders, a report and a cache. In the timeline a bar is a holder,",
        worker::GPUS
    ));
    output::message("  the thin bars below it are waiters, and a line is a hand-off. Watch one worker crash, one hang");
    output::message("  and one be evicted. To evict a holder yourself, click a lock.");
    output::message(&format!("  The demo ends after {}, or with Ctrl-C.", shown(lasts)));
}

/// Causes a crash, a hang and an eviction, over and over.
async fn run_scenario(workers: &mut Workers, locks: &LockManager, url: &str, began: Instant) -> Result<(), Failure> {
    let report = |text: String| output::message(&format!("{:>5}  {text}", shown_at(began.elapsed())));
    loop {
        sleep(PAUSE).await;
        let holder = wait_for_holder(locks, "gpu_lock:0").await?;
        let who = holder.owner.task().to_owned();
        if workers.signal(&who, Signal::KILL) {
            report(format!("{who} crashes while it holds gpu_lock:0 (kill -9)"));
            let next = successor(locks, "gpu_lock:0", &holder).await?;
            report(format!(
                "{} holds gpu_lock:0 now: on this store the lock of a dead process is free at once",
                next.owner.task()
            ));
        }

        sleep(PAUSE).await;
        workers.replace_the_dead()?;
        let holder = wait_for_holder(locks, "gpu_lock:1").await?;
        let who = holder.owner.task().to_owned();
        if workers.signal(&who, Signal::STOP) {
            report(format!("{who} hangs while it holds gpu_lock:1 (SIGSTOP): its lease is no longer renewed"));
            let hung = Instant::now();
            let next = successor(locks, "gpu_lock:1", &holder).await?;
            let after = shown(hung.elapsed());
            report(format!("after {after} the lease expired, and {} holds gpu_lock:1", next.owner.task()));
            sleep(HANG.saturating_sub(hung.elapsed())).await;
            workers.signal(&who, Signal::CONT);
            report(format!("{who} wakes up, is notified that its lease is lost, and stops"));
        }

        sleep(PAUSE).await;
        let holder = wait_for_holder(locks, "nightly-report").await?;
        if evict(url, "nightly-report", &holder).await {
            report(format!(
                "{} is told to release nightly-report (revoked, as with `leasehold evict`)",
                holder.owner.task()
            ));
            let next = successor(locks, "nightly-report", &holder).await?;
            report(format!(
                "{} holds nightly-report now; the audit shows who evicted the holder and why",
                next.owner.task()
            ));
        }
    }
}

/// Waits until a lock is held, and returns its holder.
async fn wait_for_holder(locks: &LockManager, name: &str) -> Result<Holder, Failure> {
    loop {
        if let Some(holder) = locks.holder(name).await? {
            return Ok(holder);
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Waits until a lock has another holder, and returns the new one.
async fn successor(locks: &LockManager, name: &str, before: &Holder) -> Result<Holder, Failure> {
    loop {
        let holder = wait_for_holder(locks, name).await?;
        if holder.id != before.id {
            return Ok(holder);
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Evicts like an operator: over HTTP, compared with the holder that was looked up, and audited.
async fn evict(url: &str, name: &str, holder: &Holder) -> bool {
    let address = url.trim_start_matches("http://");
    let body = json!({ "holder_id": holder.id.to_string(), "reason": "shown in the demo" }).to_string();
    let request = format!(
        "POST /api/v1/locks/{name}/evict HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    let ask = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, io::Error>(answer.starts_with("HTTP/1.1 200"))
    };
    ask.await.unwrap_or(false)
}

/// Listens on the requested address, else on the default one, else on any free port.
async fn listen(requested: Option<&str>) -> Result<(TcpListener, std::net::SocketAddr), Failure> {
    let address = requested.unwrap_or(LISTEN);
    let mut bound = TcpListener::bind(address).await;
    if bound.is_err() && requested.is_none() {
        bound = TcpListener::bind("127.0.0.1:0").await;
    }
    bound.and_then(|listener| listener.local_addr().map(|address| (listener, address))).map_err(|error| {
        Failure::new(
            Exit::Unreachable,
            format!("cannot listen on {address}: {error}; choose another address with --listen"),
        )
    })
}

fn shown_at(at: Duration) -> String {
    duration::shown(Duration::from_secs(at.as_secs()))
}

/// A temporary directory with the store of the demo, removed when dropped.
struct TempStore {
    dir: PathBuf,
}

impl TempStore {
    fn new() -> io::Result<Self> {
        let dir = std::env::temp_dir().join(format!("leasehold-demo-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&dir)?;
        Ok(Self { dir })
    }

    fn url(&self) -> String {
        format!("sqlite:{}", self.dir.join("demo.db").display())
    }

    fn choice(&self) -> Result<Choice, Failure> {
        let global = Global { store: Some(self.url()), namespace: Some("demo".into()), config: None, json: false };
        Choice::with(&global, None)
    }

    fn options(&self) -> Result<leasehold::Options, Failure> {
        let mut options = self.choice()?.options()?;
        options.journal = Some(self.dir.join("journal"));
        Ok(options)
    }
}

impl Drop for TempStore {
    fn drop(&mut self) {
        remove(&self.dir);
    }
}

/// Removes a directory. Retries, because a worker that is being killed may still create a file in it.
fn remove(dir: &Path) {
    for _ in 0..10 {
        if fs::remove_dir_all(dir).is_ok() || !dir.exists() {
            return;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The worker processes, killed when dropped.
struct Workers {
    workers: Vec<(&'static str, Workload, Child)>,
    url: String,
}

impl Workers {
    fn start(&mut self, name: &'static str, workload: Workload) -> Result<(), Failure> {
        let (workload_name, of) = (format!("{workload:?}").to_lowercase(), std::process::id().to_string());
        let child = std::env::current_exe().and_then(|program| {
            Command::new(program)
                .args(["--store", &self.url, "--namespace", "demo", "demo-worker", name, &workload_name, &of])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
        });
        let child =
            child.map_err(|error| Failure::new(Exit::Unreachable, format!("cannot start a worker: {error}")))?;
        self.workers.push((name, workload, child));
        Ok(())
    }

    /// Sends a worker a signal. Returns `false` if there is no such worker.
    fn signal(&mut self, name: &str, signal: Signal) -> bool {
        let Some((_, _, child)) = self.workers.iter_mut().find(|(worker, ..)| *worker == name) else { return false };
        // Only this process reaps it, so its process id is still valid.
        let done = kill_process(Pid::from_child(child), signal).is_ok();
        if signal == Signal::KILL {
            let _ = child.wait();
        }
        done
    }

    fn replace_the_dead(&mut self) -> Result<(), Failure> {
        let is_dead = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
        let dead = self.workers.extract_if(.., |(_, _, child)| is_dead(child)).collect::<Vec<_>>();
        dead.into_iter().try_for_each(|(name, workload, _)| self.start(name, workload))
    }

    fn kill_all(&mut self) {
        for (_, _, child) in &mut self.workers {
            // SIGKILL also ends a stopped process. An error means that it has already ended.
            let _ = child.kill();
        }
        for (_, _, mut child) in self.workers.drain(..) {
            let _ = child.wait();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.kill_all();
    }
}

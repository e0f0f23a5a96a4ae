//! `leasehold demo`: a server on a store of its own, a dozen workers, and what goes wrong with them, told as it
//! happens. Everything in it is real: processes, kills, leases. Nothing of it is left behind.

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

pub(crate) use worker::{Trade, work};

use crate::cli::{DemoArgs, Global};
use crate::duration::shown;
use crate::exit::{Exit, Failure};
use crate::serve::{refused, signalled};
use crate::store::Choice;
use crate::{duration, say};

/// Who works in the demo.
const CAST: [(&str, Trade); 12] = [
    ("tts-worker-1", Trade::Gpu),
    ("tts-worker-2", Trade::Gpu),
    ("tts-worker-3", Trade::Gpu),
    ("ocr-worker-1", Trade::Gpu),
    ("ocr-worker-2", Trade::Gpu),
    ("checkout-1", Trade::Order),
    ("checkout-2", Trade::Order),
    ("checkout-3", Trade::Order),
    ("report-1", Trade::Report),
    ("report-2", Trade::Report),
    ("pricing-1", Trade::Cache),
    ("pricing-2", Trade::Cache),
];
/// Before each of the three accidents there is time to look at the page.
const PEACE: Duration = Duration::from_secs(8);
/// Where the page is, unless somebody is there already.
const LISTEN: &str = "127.0.0.1:8847";
/// Two leases long: whoever hangs for so long has lost its lock.
const HANG: Duration = Duration::from_secs(12);
/// A GPU that is held for longer is worth an alert here.
const LONG: Duration = Duration::from_secs(7);
const SOON: Duration = Duration::from_millis(100);

/// Runs until its time is over or a signal comes.
pub(crate) fn demo(args: &DemoArgs, json: bool) -> Result<Exit, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(Exit::Unreachable, format!("no runtime: {error}")))?;
    runtime.block_on(async {
        // Before anything is made that a signal would leave behind.
        let signalled = signalled()?;
        let place = Place::new().map_err(|error| {
            let dir = std::env::temp_dir();
            Failure::new(Exit::Unreachable, format!("nothing can be written to {}: {error}", dir.display()))
        })?;
        let (listener, address) = listen(args.listen.as_deref()).await?;
        let locks = place.store()?.connect_with(place.options()?).await?;
        let mut settings = Settings::default();
        settings.audit = Some(place.dir.join("audit.jsonl"));
        // As in earnest, but soon enough to be seen.
        settings.monitor.enabled = true;
        settings.monitor.monitor_interval = Duration::from_secs(1);
        settings.monitor.timeout_levels.warning = LONG;
        let mut crew = Crew { workers: Vec::new(), url: place.url() };
        for (name, trade) in CAST {
            crew.hire(name, trade)?;
        }
        let url = format!("http://{address}");
        if json {
            say::json(&json!({ "url": url, "store": locks.store() }))?;
        }
        introduce(&url, args.lasts);
        let began = Instant::now();
        let play = async {
            let over = tokio::time::timeout(args.lasts, play(&mut crew, &locks, &url, began));
            tokio::select! {
                played = over => played.unwrap_or(Ok(())),
                () = signalled => Ok(()),
            }
        };
        let (played, done) = (tokio::sync::Mutex::new(Ok(())), tokio_util::sync::CancellationToken::new());
        let server = Server::new(locks.clone(), settings);
        let ended = done.clone();
        let serving = server.run(listener, async move { ended.cancelled().await });
        let playing = async {
            *played.lock().await = play.await;
            done.cancel();
        };
        let (served, ()) = tokio::join!(serving, playing);
        crew.dismiss();
        locks.shutdown().await;
        served.map_err(refused)?;
        played.into_inner()?;
        say::talk("the demo is over; nothing of it is left behind");
        Ok(Exit::Done)
    })
}

fn introduce(url: &str, lasts: Duration) {
    say::talk(&format!("open {url}"));
    say::talk(&format!(
        "  Twelve workers share {} GPUs, four orders, a report and a cache. In the timeline every bar is somebody",
        worker::GPUS
    ));
    say::talk(
        "  who holds a lock, the thin bars below are those who wait, and a line is a hand-over. Watch what happens",
    );
    say::talk("  to one that crashes, one that hangs and one that is evicted; take one away yourself (click a lock).");
    say::talk(&format!("  It ends by itself after {}, or with Ctrl-C.", shown(lasts)));
}

/// The three accidents, again and again.
async fn play(crew: &mut Crew, locks: &LockManager, url: &str, began: Instant) -> Result<(), Failure> {
    let say = |text: String| say::talk(&format!("{:>5}  {text}", shown_at(began.elapsed())));
    loop {
        sleep(PEACE).await;
        let holder = held(locks, "gpu_lock:0").await?;
        let who = holder.owner.task().to_owned();
        if crew.signal(&who, Signal::KILL) {
            say(format!("{who} crashes with gpu_lock:0 in hand (kill -9)"));
            let next = successor(locks, "gpu_lock:0", &holder).await?;
            say(format!(
                "{} holds gpu_lock:0 now: on this store a dead holder's lock is free at once",
                next.owner.task()
            ));
        }

        sleep(PEACE).await;
        crew.replace_the_dead()?;
        let holder = held(locks, "gpu_lock:1").await?;
        let who = holder.owner.task().to_owned();
        if crew.signal(&who, Signal::STOP) {
            say(format!("{who} hangs with gpu_lock:1 in hand (SIGSTOP): its lease is not renewed any more"));
            let hung = Instant::now();
            let next = successor(locks, "gpu_lock:1", &holder).await?;
            let after = shown(hung.elapsed());
            say(format!("after {after} the lease was over, and {} holds gpu_lock:1", next.owner.task()));
            sleep(HANG.saturating_sub(hung.elapsed())).await;
            crew.signal(&who, Signal::CONT);
            say(format!("{who} wakes up, learns that its lease is lost, and stops; nobody was harmed"));
        }

        sleep(PEACE).await;
        let holder = held(locks, "nightly-report").await?;
        if evict(url, "nightly-report", &holder).await {
            say(format!(
                "{} is told to give nightly-report up (revoked, as with `leasehold evict`)",
                holder.owner.task()
            ));
            let next = successor(locks, "nightly-report", &holder).await?;
            say(format!("{} holds nightly-report now; who took it away, and why, is in the audit", next.owner.task()));
        }
    }
}

/// Who holds a lock, as soon as somebody does.
async fn held(locks: &LockManager, name: &str) -> Result<Holder, Failure> {
    loop {
        if let Some(holder) = locks.holder(name).await? {
            return Ok(holder);
        }
        sleep(SOON).await;
    }
}

/// Who holds it after this one.
async fn successor(locks: &LockManager, name: &str, before: &Holder) -> Result<Holder, Failure> {
    loop {
        let holder = held(locks, name).await?;
        if holder.id != before.id {
            return Ok(holder);
        }
        sleep(SOON).await;
    }
}

/// As an operator does it: over HTTP, compared with the holder that was looked at, and written down.
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

/// Where it was said, else the usual place, else any: somebody may serve there already.
async fn listen(wish: Option<&str>) -> Result<(TcpListener, std::net::SocketAddr), Failure> {
    let usual = wish.unwrap_or(LISTEN);
    let mut bound = TcpListener::bind(usual).await;
    if bound.is_err() && wish.is_none() {
        bound = TcpListener::bind("127.0.0.1:0").await;
    }
    bound.and_then(|listener| listener.local_addr().map(|address| (listener, address))).map_err(|error| {
        Failure::new(Exit::Unreachable, format!("{usual} cannot be listened on: {error}; choose another with --listen"))
    })
}

fn shown_at(at: Duration) -> String {
    duration::shown(Duration::from_secs(at.as_secs()))
}

/// A directory of its own, gone with it.
struct Place {
    dir: PathBuf,
}

impl Place {
    fn new() -> io::Result<Self> {
        let dir = std::env::temp_dir().join(format!("leasehold-demo-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&dir)?;
        Ok(Self { dir })
    }

    fn url(&self) -> String {
        format!("sqlite:{}", self.dir.join("demo.db").display())
    }

    fn store(&self) -> Result<Choice, Failure> {
        let global = Global { store: Some(self.url()), namespace: Some("demo".into()), config: None, json: false };
        Choice::with(&global, None)
    }

    fn options(&self) -> Result<leasehold::Options, Failure> {
        let mut options = self.store()?.options()?;
        options.journal = Some(self.dir.join("journal"));
        Ok(options)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        remove(&self.dir);
    }
}

/// A worker that is just being killed may write a last file while the others are removed.
fn remove(dir: &Path) {
    for _ in 0..10 {
        if fs::remove_dir_all(dir).is_ok() || !dir.exists() {
            return;
        }
        std::thread::sleep(SOON);
    }
}

/// The workers, killed when dropped.
struct Crew {
    workers: Vec<(&'static str, Trade, Child)>,
    url: String,
}

impl Crew {
    fn hire(&mut self, name: &'static str, trade: Trade) -> Result<(), Failure> {
        let (trade_name, of) = (format!("{trade:?}").to_lowercase(), std::process::id().to_string());
        let child = std::env::current_exe().and_then(|program| {
            Command::new(program)
                .args(["--store", &self.url, "--namespace", "demo", "demo-worker", name, &trade_name, &of])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
        });
        let child = child.map_err(|error| Failure::new(Exit::Unreachable, format!("no worker starts: {error}")))?;
        self.workers.push((name, trade, child));
        Ok(())
    }

    /// Whether there was such a worker.
    fn signal(&mut self, name: &str, signal: Signal) -> bool {
        let Some((_, _, child)) = self.workers.iter_mut().find(|(worker, ..)| *worker == name) else { return false };
        // Reaped only by us, so the number is still its own.
        let done = kill_process(Pid::from_child(child), signal).is_ok();
        if signal == Signal::KILL {
            let _ = child.wait();
        }
        done
    }

    fn replace_the_dead(&mut self) -> Result<(), Failure> {
        let is_dead = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
        let dead = self.workers.extract_if(.., |(_, _, child)| is_dead(child)).collect::<Vec<_>>();
        dead.into_iter().try_for_each(|(name, trade, _)| self.hire(name, trade))
    }

    fn dismiss(&mut self) {
        for (_, _, child) in &mut self.workers {
            // A stopped process is killed, too; one that is gone already needs nothing.
            let _ = child.kill();
        }
        for (_, _, mut child) in self.workers.drain(..) {
            let _ = child.wait();
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.dismiss();
    }
}

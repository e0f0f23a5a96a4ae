//! Locks in a SQLite file, shared by all processes of one machine.
//!
//! The driver thread owns the SQLite connection and serves commands. The inbox thread reads a FIFO through which other
//! processes wake this one up, and watches the FIFOs of holders that this process waits for, to detect their deaths.
//!
//! | file | contents |
//! |---|---|
//! | `serve`, `driver` | the driver thread: its commands and their loop, its state |
//! | `verbs` | the operations on a lock: fast path first, then slow path |
//! | `fast_path` | one statement per operation, for a lock without waiters |
//! | `slow_path` | the state machine in a transaction, for a lock with waiters |
//! | `transaction` | begin, commit, roll back, retry when the disk is full |
//! | `bind`, `bindings` | bindings and results of `once`: the commands, the rows |
//! | `inspect`, `checkup` | what people see: holders, queues, lists, events, counters, findings |
//! | `waiters`, `holders` | the attempts of this process that wait, and the holders they wait for |
//! | `inbox`, `death_watch` | the inbox thread, messages from other processes, and the holders whose death it detects |
//! | `liveness` | the FIFO that shows that a process lives |
//! | `sweep` | removes the FIFOs and messages of dead processes |
//! | `garbage` | removes rows of free locks; decides when to do maintenance |
//! | `checkpoint` | keeps the write-ahead log short |
//! | `disk_reserve` | pages for releases on a full disk |
//! | `schema`, `row` | tables, settings and migrations; reading and writing rows |
//! | `path`, `permissions` | where the file may be; file modes |
//! | `pairing` | the database and its `.alive` directory belong together |
//! | `displaced` | detects that the database was removed or replaced while open |
//! | `forking` | closes every file before this process forks |
//! | `boot` | the boot id, and the boot clock that all containers of a kernel share |
//!
//! A store does not survive a fork: in the child every operation fails with [`Forked`](StoreErrorKind::Forked), and
//! nothing that belongs to the parent is touched. The child can open the file again if no file was open at the fork:
//! [`Forking`].

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use self::death_watch::DeathWatch;
use self::disk_reserve::DiskReserve;
use self::displaced::OpenFiles;
use self::driver::{GarbageProgress, SqliteDriver};
use self::forking::{OpenGuard, Registration};
use self::liveness::Liveness;
use self::permissions::Sharing;
use self::row::Key;
use self::serve::{Command, ReplySender};
use self::waiters::{AcquireCall, LocalWaiters};
use super::on_machine::Asking;
use super::*;
use crate::facts::KeySpace;
use crate::machine::Limits;

mod bind;
mod bindings;
mod boot;
mod checkpoint;
mod checkup;
mod death_watch;
mod disk_reserve;
mod displaced;
mod driver;
mod fast_path;
mod forking;
mod garbage;
mod holders;
mod inbox;
mod inspect;
mod liveness;
mod pairing;
mod path;
mod permissions;
mod row;
mod schema;
mod serve;
mod slow_path;
mod sweep;
mod transaction;
mod verbs;
mod waiters;

pub use forking::Forking;
pub use path::default_path;

/// The interval at which followers poll for new events.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

/// Locks in a SQLite file, shared by every process of this machine that opens it.
pub struct SqliteStore {
    path: PathBuf,
    keys: KeySpace,
    liveness: Arc<Liveness>,
    /// The id of the process that opened the file.
    pid: AtomicU32,
    /// `None` once the store is dropped.
    driver: Option<DriverHandle>,
}

/// The ways to the driver thread, and back from it.
struct DriverHandle {
    commands: Sender<Command>,
    pushes: PushSender,
}

impl SqliteStore {
    /// Opens the file. Creates it and its directory if they do not exist.
    ///
    /// # Errors
    /// [`StoreErrorKind::File`] if the file is not a database of leasehold, is not writable or is on a network
    /// filesystem; [`StoreErrorKind::NewerVersion`], [`StoreErrorKind::DiskFull`], [`StoreErrorKind::Busy`].
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_with(path, KeySpace::default())
    }

    /// Opens the file with a namespace and raw names. Stores with different namespaces on one file share only raw
    /// names.
    ///
    /// # Errors
    /// As [`SqliteStore::open`].
    pub fn open_with(path: &Path, keys: KeySpace) -> Result<Self, StoreError> {
        let given = std::path::absolute(path).map_err(|e| path::unusable(path, &e))?;
        let path = path::prepare(path)?;
        let sharing = Sharing::of(path::directory(&path)).map_err(|e| path::unusable(&path, &e))?;
        let boot = boot::read()?;
        let open = OpenGuard::begin()?;
        let (mut conn, busy_timeout, _) = schema::open(&path, sharing)?;
        let open_files = OpenFiles::note(&conn, &path, &given)?;
        let liveness = Arc::new(Liveness::create(pairing::pair(&mut conn, &path, sharing)?, sharing)?);
        sweep::sweep(&mut conn, &liveness);
        sweep::forget_messages(&conn, &liveness);
        let reserve = DiskReserve::prepare(&conn, &busy_timeout, &path, sharing)?;
        let watch = Arc::new(DeathWatch::default());
        let (commands, inbound) = channel();
        let pushes = PushSender::new();
        let (wakes, own, watched) = (commands.clone(), liveness.clone(), watch.clone());
        let listener = spawn("leasehold-inbox", move || inbox::listen(&own, &watched, &wakes))?;
        let driver = SqliteDriver {
            conn,
            open: Some(open),
            _registration: Registration::new({
                let commands = commands.clone();
                // An error means that the driver thread has stopped.
                move || drop(commands.send(Command::CloseForFork))
            }),
            path: path.clone(),
            keys: keys.clone(),
            busy_timeout,
            boot,
            liveness: liveness.clone(),
            watch,
            pushes: pushes.clone(),
            limits: Limits::DEFAULT,
            waiters: LocalWaiters::default(),
            checks_holders: true,
            reserve,
            garbage: GarbageProgress::default(),
            sharing,
            open_files,
            listener: Some(listener),
            read_up_to: 0,
        };
        spawn("leasehold-sqlite", move || driver.run(&inbound))?;
        let pid = AtomicU32::new(std::process::id());
        Ok(Self { path, keys, liveness, pid, driver: Some(DriverHandle { commands, pushes }) })
    }

    /// Pairs a database with the `.alive` directory beside it, after it was copied, moved or restored without its own.
    /// Use it only when no process uses the database by another path.
    ///
    /// # Errors
    /// [`StoreErrorKind::Busy`] while leases in it last: their holders may be alive without being visible from here.
    /// Otherwise as [`SqliteStore::open`].
    pub fn adopt(path: &Path) -> Result<(), StoreError> {
        pairing::adopt(path)
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs an integrity check on the whole file. Returns `ok`, or what is wrong with it.
    ///
    /// # Errors
    /// As every operation.
    pub async fn integrity(&self) -> Result<String, StoreError> {
        self.call(SqliteDriver::check).await
    }

    /// Ends a lease as if its ttl had run out.
    #[cfg(any(test, feature = "test-hooks"))]
    #[doc(hidden)]
    pub fn expire(&self, name: &LockName) {
        let Ok(key) = self.key(name) else { return };
        let (done, wait) = channel();
        self.configure(move |driver| {
            let _ = driver.conn.execute("UPDATE locks SET ends = 0 WHERE name = ?1", [key.as_str()]);
            let _ = done.send(());
        });
        // An error means that the command was dropped.
        let _ = wait.recv();
    }

    /// Sets how long a grant lasts until it is confirmed.
    #[cfg(any(test, feature = "test-hooks"))]
    #[doc(hidden)]
    pub fn set_provisional_ms(&self, ms: u64) {
        self.configure(move |driver| driver.limits.provisional_ms = ms);
    }

    /// Sets whether a waiter takes the lock by itself when its holder died or the lease ended. Tests turn that off to
    /// compare answers step by step.
    #[cfg(any(test, feature = "test-hooks"))]
    #[doc(hidden)]
    pub fn set_looks_around(&self, looks: bool) {
        self.configure(move |driver| driver.checks_holders = looks);
    }

    /// Makes the store behave as in a forked child.
    #[cfg(any(test, feature = "test-hooks"))]
    #[doc(hidden)]
    pub fn pretend_forked(&self, forked: bool) {
        let pid = std::process::id();
        self.pid.store(if forked { pid.wrapping_add(1) } else { pid }, Ordering::Relaxed);
    }

    fn is_forked(&self) -> bool {
        self.pid.load(Ordering::Relaxed) != std::process::id()
    }

    /// Returns the way to the driver thread, which does not exist in a forked child.
    fn driver(&self) -> Result<&DriverHandle, StoreError> {
        if self.is_forked() {
            return Err(StoreErrorKind::Forked.into());
        }
        self.driver.as_ref().ok_or_else(|| StoreErrorKind::Closed.into())
    }

    fn send(&self, command: Command) -> Result<(), StoreError> {
        self.driver()?.commands.send(command).map_err(|_| StoreErrorKind::Closed.into())
    }

    async fn ask<R>(&self, command: impl FnOnce(ReplySender<R>) -> Command) -> Result<R, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply))?;
        answer.await.unwrap_or_else(|_| Err(StoreErrorKind::Closed.into()))
    }

    /// Runs `run` on the driver thread.
    async fn call<R: Send + 'static>(
        &self,
        run: impl FnOnce(&mut SqliteDriver) -> Result<R, StoreError> + Send + 'static,
    ) -> Result<R, StoreError> {
        self.ask(|reply| Command::call(run, reply)).await
    }

    /// Runs `run` on the driver thread, unless the store is closed or the database displaced. Does not wait.
    #[cfg(any(test, feature = "test-hooks"))]
    fn configure(&self, run: impl FnOnce(&mut SqliteDriver) + Send + 'static) {
        let call = |driver: Result<&mut SqliteDriver, StoreError>| drop(driver.map(run));
        let _ = self.send(Command::Call(Box::new(call)));
    }

    fn key(&self, name: &LockName) -> Result<Key, StoreError> {
        Ok(self.keys.key(name)?.into())
    }

    fn acquire_call(&self, request: &AcquireRequest) -> Result<AcquireCall, StoreError> {
        let asking = Asking::new(request, self.liveness.id(), boot::floor_now());
        Ok(AcquireCall { name: self.key(&request.name)?, asking })
    }
}

impl Drop for SqliteStore {
    fn drop(&mut self) {
        let Some(driver) = self.driver.take() else { return };
        if self.is_forked() {
            // A thread of the parent may have been using the channel at the fork.
            std::mem::forget(driver);
            return;
        }
        let _ = driver.commands.send(Command::Close(oneshot::channel().0));
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Try, StoreError> {
        let call = self.acquire_call(request)?;
        self.ask(|reply| Command::Try(call, reply)).await
    }

    async fn acquire(&self, request: &AcquireRequest, ticket: Option<Ticket>) -> Result<Acquire, StoreError> {
        let call = self.acquire_call(request)?;
        self.ask(|reply| Command::Acquire(call, ticket, reply)).await
    }

    async fn ticket(&self) -> Result<Ticket, StoreError> {
        self.call(SqliteDriver::ticket).await
    }

    async fn release(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        let key = self.key(name)?;
        self.ask(|reply| Command::Release(key, token.clone(), reply)).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Renewed> {
        let (reply, answer) = oneshot::channel();
        let unknown = |error: StoreError| vec![Renewed::Unknown(error); renewals.len()];
        let keyed = |renewal: &Renewal| Ok((self.key(&renewal.name)?, renewal.clone()));
        let keyed: Result<Vec<_>, StoreError> = renewals.iter().map(keyed).collect();
        if let Err(error) = keyed.and_then(|renewals| self.send(Command::Renew(renewals, reply))) {
            return unknown(error);
        }
        answer.await.unwrap_or_else(|_| unknown(StoreErrorKind::Closed.into()))
    }

    async fn leave(&self, request: &AcquireRequest) -> Result<Left, StoreError> {
        let key = self.key(&request.name)?;
        self.ask(|reply| Command::Leave(key, request.token.clone(), reply)).await
    }

    async fn evict(&self, name: &LockName, holder: HolderId, mode: EvictMode) -> Result<Evicted, StoreError> {
        let key = self.key(name)?;
        self.call(move |driver| driver.evict(&key, holder, mode == EvictMode::Force)).await
    }

    async fn ask_to_finish(
        &self,
        name: &LockName,
        holder: HolderId,
        reason: &str,
    ) -> Result<FinishRequest, StoreError> {
        let (key, reason) = (self.key(name)?, reason.to_owned());
        self.call(move |driver| driver.ask_to_finish(&key, holder, &reason)).await
    }

    fn deliver_to(&self, receiver: Arc<dyn PushReceiver>) {
        if let Ok(driver) = self.driver() {
            driver.pushes.attach(receiver);
        }
    }

    async fn note(&self, notes: Vec<Note>) -> Result<(), StoreError> {
        // Listing is cheap in this store, so there is no index.
        let event = |note| if let Note::Tell(event) = note { Some(event) } else { None };
        let events: Vec<_> = notes.into_iter().filter_map(event).collect();
        if events.is_empty() {
            return Ok(());
        }
        self.call(move |driver| driver.publish(&events)).await
    }

    async fn count(&self, deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        let deltas = deltas.to_vec();
        self.call(move |driver| driver.count(&deltas)).await
    }

    fn lifeline(&self) -> Option<OwnedFd> {
        if self.is_forked() { None } else { self.liveness.lifeline() }
    }

    async fn close(&self) {
        let (reply, done) = oneshot::channel();
        if self.send(Command::Close(reply)).is_ok() {
            let _ = done.await;
        }
    }
}

#[async_trait]
impl Inspect for SqliteStore {
    fn describe(&self) -> String {
        format!("sqlite:{}", self.path.display())
    }

    async fn holder(&self, name: &LockName) -> Result<Option<Holder>, StoreError> {
        let key = self.key(name)?;
        self.call(move |driver| driver.holder(&key)).await
    }

    async fn list(&self, prefix: &str, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        let (prefix, after) = (prefix.to_owned(), after.map(|cursor| cursor.0));
        self.call(move |driver| driver.list(&prefix, after.as_deref(), limit)).await
    }

    async fn queue(&self, name: &LockName) -> Result<Vec<Waiter>, StoreError> {
        let key = self.key(name)?;
        self.call(move |driver| driver.queue(&key)).await
    }

    async fn long_held(&self, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        self.list("", after, limit).await
    }

    async fn counters(&self) -> Result<Vec<(String, u64)>, StoreError> {
        self.call(SqliteDriver::counters).await
    }

    async fn checkup(&self) -> Vec<Finding> {
        match self.call(|driver| Ok(driver.checkup())).await {
            Ok(findings) => findings,
            Err(error) => vec![Finding::bad("reachable", error.to_string())],
        }
    }

    async fn follow(&self) -> Result<mpsc::Receiver<LockEvent>, StoreError> {
        let (mut last, _) = self.call(|driver| driver.events(None)).await?;
        let (sender, events) = mpsc::channel(1_024);
        let commands = self.driver()?.commands.clone();
        tokio::spawn(async move {
            while !sender.is_closed() {
                tokio::time::sleep(FOLLOW_INTERVAL).await;
                let (reply, answer) = oneshot::channel();
                if commands.send(Command::call(move |driver| driver.events(Some(last)), reply)).is_err() {
                    return;
                }
                match answer.await {
                    Ok(Ok((seen, new))) => {
                        last = seen;
                        // The stream of a follower that does not keep up ends.
                        if new.into_iter().any(|event| sender.try_send(event).is_err()) {
                            return;
                        }
                    }
                    Ok(Err(_)) => {}
                    Err(_) => return,
                }
            }
        });
        Ok(events)
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StoreError> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map_err(|e| StoreError::new(StoreErrorKind::Other, format!("no thread: {e}")))
}

//! Locks in a file, for all processes of one machine.
//!
//! A thread owns the connection and takes commands; another listens at a FIFO through which other
//! processes wake us up, and at the FIFOs of holders we wait for, which say when one dies.
//!
//! | file | what it is about |
//! |---|---|
//! | `driver`, `verbs`, `look`, `bindings` | the thread and what it does for each command |
//! | `fast`, `turn` | a lock nobody waits for, a lock somebody waits for |
//! | `alive`, `sweep`, `ear`, `waits` | which processes live, which are to be woken up, which we wait for |
//! | `boot` | the boot clock that all containers of a kernel share |
//! | `forking` | this process forks, and no file is open at that moment |
//! | `schema`, `row`, `room`, `checkup` | the file: its tables, its rows, its size, its health |
//! | `path`, `pairing`, `displaced`, `modes` | its one path, its `.alive` directory, its removal while in use, its access rights |
//!
//! A store does not survive a fork: in the child every verb answers
//! [`Forked`](StoreErrorKind::Forked), and nothing of the parent's is touched. The child can open the file anew,
//! if it was closed at that moment: [`Forking`].

use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use self::alive::Alive;
use self::displaced::Opened;
use self::driver::{Ask, Command, Driver, Reply};
use self::ear::Watch;
use self::forking::{Listed, Open};
use self::modes::Sharing;
use self::room::Room;
use self::row::Key;
use self::waits::{Waits, floor_now};
use super::*;
use crate::facts::KeySpace;
use crate::machine::{Asking, Limits};

mod alive;
mod bindings;
mod boot;
mod checkup;
mod displaced;
mod driver;
mod ear;
mod fast;
mod forking;
mod look;
mod modes;
mod pairing;
mod path;
mod room;
mod row;
mod schema;
mod sweep;
mod turn;
mod verbs;
mod waits;

pub use forking::Forking;
pub use path::default_path;

/// How often followers look for new events.
const FOLLOW_EVERY: Duration = Duration::from_millis(200);

/// Locks in a SQLite file, shared by every process of this machine that opens it.
pub struct SqliteStore {
    path: PathBuf,
    keys: KeySpace,
    alive: Arc<Alive>,
    /// The process that opened it.
    pid: AtomicU32,
    /// Not dropped in a forked child: the thread it leads to does not exist there.
    commands: ManuallyDrop<Sender<Command>>,
    pushes: ManuallyDrop<Mutex<Option<mpsc::UnboundedReceiver<Push>>>>,
}

impl SqliteStore {
    /// Opens the file, making it and its directory where there is none.
    ///
    /// # Errors
    /// [`StoreErrorKind::File`] for a file that is no database of ours, may not be written or is on
    /// a network filesystem, [`StoreErrorKind::NewerVersion`], [`StoreErrorKind::DiskFull`],
    /// [`StoreErrorKind::Busy`].
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_with(path, KeySpace::default())
    }

    /// The same with a namespace and raw names of one's own: stores with different namespaces on one file
    /// share its raw names, and nothing else.
    ///
    /// # Errors
    /// As [`SqliteStore::open`].
    pub fn open_with(path: &Path, keys: KeySpace) -> Result<Self, StoreError> {
        let given = std::path::absolute(path).map_err(|e| path::unusable(path, &e))?;
        let path = path::prepare(path)?;
        let sharing = Sharing::of(path::directory(&path)).map_err(|e| path::unusable(&path, &e))?;
        let boot = boot::read()?;
        let open = Open::begin()?;
        let (mut conn, patience, _) = schema::open(&path, sharing)?;
        let opened = Opened::note(&conn, &path, &given)?;
        let alive = Arc::new(Alive::create(pairing::pair(&mut conn, &path, sharing)?, sharing)?);
        sweep::sweep(&mut conn, &alive);
        sweep::forget_messages(&conn, &alive);
        let room = Room::prepare(&conn, &patience, &path, sharing)?;
        let watch = Arc::new(Watch::default());
        let (commands, inbound) = channel();
        let (tell, pushes) = mpsc::unbounded_channel();
        let (ear, listening, watched) = (commands.clone(), alive.clone(), watch.clone());
        let listener = spawn("leasehold-ear", move || ear::listen(&listening, &watched, &ear))?;
        let driver = Driver {
            conn,
            open: Some(open),
            _listed: Listed::new(commands.clone()),
            path: path.clone(),
            keys: keys.clone(),
            patience,
            boot,
            alive: alive.clone(),
            watch,
            pushes: tell,
            limits: Limits::DEFAULT,
            waits: Waits::default(),
            looks_around: true,
            room,
            sharing,
            opened,
            listener: Some(listener),
        };
        spawn("leasehold-sqlite", move || driver.run(&inbound))?;
        let pid = AtomicU32::new(std::process::id());
        let pushes = ManuallyDrop::new(Mutex::new(Some(pushes)));
        Ok(Self { path, keys, alive, pid, commands: ManuallyDrop::new(commands), pushes })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the whole file and says `ok`, or what is wrong with it.
    ///
    /// # Errors
    /// As every verb.
    pub async fn integrity(&self) -> Result<String, StoreError> {
        self.ask(Command::Check).await
    }

    /// Ends a lease as if its time had run out.
    #[doc(hidden)]
    pub fn expire(&self, name: &LockName) {
        let (done, wait) = channel();
        if self.key(name).and_then(|key| self.send(Command::Expire(key, done))).is_ok() {
            let _ = wait.recv();
        }
    }

    /// How long a grant lasts that nobody has confirmed yet.
    #[doc(hidden)]
    pub fn set_provisional_ms(&self, ms: u64) {
        let _ = self.send(Command::Provisional(ms));
    }

    /// Whether a waiter helps itself when a holder died or its lease ended. Without it nothing
    /// happens but what is asked, so that answers can be compared step by step.
    #[doc(hidden)]
    pub fn set_looks_around(&self, looks: bool) {
        let _ = self.send(Command::LooksAround(looks));
    }

    /// Makes the store believe that another process opened it, as it would after a fork.
    #[doc(hidden)]
    pub fn pretend_forked(&self, forked: bool) {
        let pid = std::process::id();
        self.pid.store(if forked { pid.wrapping_add(1) } else { pid }, Ordering::Relaxed);
    }

    fn is_forked(&self) -> bool {
        self.pid.load(Ordering::Relaxed) != std::process::id()
    }

    fn send(&self, command: Command) -> Result<(), StoreError> {
        if self.is_forked() {
            return Err(StoreErrorKind::Forked.into());
        }
        self.commands.send(command).map_err(|_| StoreErrorKind::Closed.into())
    }

    async fn ask<R>(&self, command: impl FnOnce(Reply<R>) -> Command) -> Result<R, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply))?;
        answer.await.unwrap_or_else(|_| Err(StoreErrorKind::Closed.into()))
    }

    fn key(&self, name: &LockName) -> Result<Key, StoreError> {
        Ok(self.keys.key(name)?.into())
    }

    fn attempt(&self, claim: &Claim) -> Result<Ask, StoreError> {
        Ok(Ask {
            name: self.key(&claim.name)?,
            asking: Asking {
                token: claim.token.clone(),
                inbox: claim.listens.then(|| self.alive.id().clone()),
                ttl_ms: claim.ttl.as_millis(),
                since_ms: claim.since_ms,
                owner: claim.owner.clone(),
                fenced: claim.fenced,
            },
            lasts: claim.ttl.duration(),
            asked_at: floor_now(),
        })
    }
}

impl Drop for SqliteStore {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        let _ = self.commands.send(Command::Close(oneshot::channel().0));
        // The last use of both, in the process they belong to.
        drop(std::mem::replace(&mut *self.commands, channel().0));
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn try_acquire(&self, claim: &Claim) -> Result<Try, StoreError> {
        let ask = self.attempt(claim)?;
        self.ask(|reply| Command::Try(ask, reply)).await
    }

    async fn acquire(&self, claim: &Claim, ticket: Option<Ticket>) -> Result<Acquire, StoreError> {
        let ask = self.attempt(claim)?;
        self.ask(|reply| Command::Acquire(ask, ticket, reply)).await
    }

    async fn ticket(&self) -> Result<Ticket, StoreError> {
        self.ask(Command::Ticket).await
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

    async fn leave(&self, claim: &Claim) -> Result<Left, StoreError> {
        let key = self.key(&claim.name)?;
        self.ask(|reply| Command::Leave(key, claim.token.clone(), reply)).await
    }

    async fn evict(&self, name: &LockName, holder: HolderId, mode: EvictMode) -> Result<Evicted, StoreError> {
        let key = self.key(name)?;
        self.ask(|reply| Command::Evict(key, holder, mode == EvictMode::Force, reply)).await
    }

    async fn ask_to_finish(&self, name: &LockName, holder: HolderId, reason: &str) -> Result<Asked, StoreError> {
        let key = self.key(name)?;
        self.ask(|reply| Command::AskToFinish(key, holder, reason.to_owned(), reply)).await
    }

    fn pushes(&self) -> mpsc::UnboundedReceiver<Push> {
        if self.is_forked() {
            return mpsc::unbounded_channel().1;
        }
        let taken = self.pushes.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.unwrap_or_else(|| mpsc::unbounded_channel().1)
    }

    async fn note(&self, notes: Vec<Note>) -> Result<(), StoreError> {
        // Listing is cheap here, so there is no index to enter anything in.
        let tell = |note| if let Note::Tell(event) = note { Some(event) } else { None };
        let events: Vec<_> = notes.into_iter().filter_map(tell).collect();
        if events.is_empty() {
            return Ok(());
        }
        self.ask(|reply| Command::Tell(events, reply)).await
    }

    async fn count(&self, deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        self.ask(|reply| Command::Count(deltas.to_vec(), reply)).await
    }

    fn lifeline(&self) -> Option<OwnedFd> {
        if self.is_forked() { None } else { self.alive.lifeline() }
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
        self.ask(|reply| Command::Holder(key, reply)).await
    }

    async fn list(&self, prefix: &str, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        let (prefix, after) = (prefix.to_owned(), after.map(|cursor| cursor.0));
        self.ask(|reply| Command::List { prefix, after, limit, reply }).await
    }

    async fn queue(&self, name: &LockName) -> Result<Vec<Waiter>, StoreError> {
        let key = self.key(name)?;
        self.ask(|reply| Command::Queue(key, reply)).await
    }

    async fn long_held(&self, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        self.list("", after, limit).await
    }

    async fn counters(&self) -> Result<Vec<(String, u64)>, StoreError> {
        self.ask(Command::Counters).await
    }

    async fn checkup(&self) -> Vec<Finding> {
        match self.ask(Command::Checkup).await {
            Ok(findings) => findings,
            Err(error) => vec![Finding::bad("reachable", error.to_string())],
        }
    }

    async fn follow(&self) -> Result<mpsc::Receiver<LockEvent>, StoreError> {
        let (mut last, _) = self.ask(|reply| Command::Events { after: None, reply }).await?;
        let (tell, events) = mpsc::channel(1_024);
        let commands = Sender::clone(&self.commands);
        tokio::spawn(async move {
            while !tell.is_closed() {
                tokio::time::sleep(FOLLOW_EVERY).await;
                let (reply, answer) = oneshot::channel();
                if commands.send(Command::Events { after: Some(last), reply }).is_err() {
                    return;
                }
                match answer.await {
                    Ok(Ok((seen, new))) => {
                        last = seen;
                        // A follower that does not keep up is shown out.
                        if new.into_iter().any(|event| tell.try_send(event).is_err()) {
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

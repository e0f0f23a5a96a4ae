//! The thread that owns the SQLite connection, and the commands it takes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread::{self, JoinHandle};

use rusqlite::Connection;
use tokio::sync::oneshot;

use super::bindings::{Changing, Creating};
use super::disk_reserve::{DiskReserve, Need};
use super::displaced::OpenFiles;
use super::fast_path;
use super::forking::{OpenGuard, Registration};
use super::garbage::GarbageProgress;
use super::inbox::DeathWatch;
use super::liveness::Liveness;
use super::permissions::Sharing;
use super::row::Key;
use super::schema::{self, BusyTimeout, sqlite_error};
use super::transaction::roll_back;
use super::waiters::LocalWaiters;
use crate::clock::Moment;
use crate::facts::{KeySpace, Token};
use crate::machine::{Claimant, FenceUnusable, InboxId, Limits};
use crate::store::*;

/// Most commands taken off the channel at once. One transaction serves those that the fast path can.
const BATCH_MAX: usize = 64;
/// The interval between attempts to reopen the file.
const REOPEN_INTERVAL: Duration = Duration::from_millis(20);

/// The channel for the answer to a command.
pub(super) type ReplySender<R> = oneshot::Sender<Result<R, StoreError>>;

/// Work for the driver thread. It gets an error instead of the driver if the database was displaced.
type DriverCall = Box<dyn FnOnce(Result<&mut SqliteDriver, StoreError>) + Send>;

/// A command for the driver thread. Commands that are batched, or that have their own answer when the database is
/// displaced, are variants; the others are a [`Command::Call`].
///
/// The answer to a caller that gave up is dropped: that caller undoes the command with `leave`.
pub(super) enum Command {
    Try(AcquireCall, ReplySender<Try>),
    Acquire(AcquireCall, Option<Ticket>, ReplySender<Acquire>),
    Release(Key, Token, ReplySender<Release>),
    Renew(Vec<(Key, Renewal)>, oneshot::Sender<Vec<Renewed>>),
    Leave(Key, Token, ReplySender<Left>),
    Create(Box<Creating>, ReplySender<Create>),
    Change(Box<Changing>, ReplySender<Changed>),
    Call(DriverCall),
    /// A byte was written to our FIFO.
    Wake,
    /// A second went by while claims of ours wait, or a holder died.
    CheckHolders,
    /// This process forks: closes the file, and reopens it after the fork.
    CloseForFork,
    Close(oneshot::Sender<()>),
}

/// A try or an acquire.
#[derive(Clone)]
pub(super) struct AcquireCall {
    pub(super) name: Key,
    pub(super) asking: Claimant,
    pub(super) lasts: Duration,
    pub(super) asked_at: Moment,
}

impl AcquireCall {
    pub(super) fn grant(&self, fence: u64) -> Grant {
        let fence = self.asking.fenced.then_some(Fence::new(fence));
        Grant { fence, asked_at: self.asked_at, lasts: self.lasts }
    }
}

/// Why a command failed.
#[derive(Debug)]
pub(super) enum Fault {
    Sql(rusqlite::Error),
    Store(StoreError),
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

impl From<FenceUnusable> for Fault {
    fn from(error: FenceUnusable) -> Self {
        Self::Store(error.into())
    }
}

/// The state that the driver thread owns.
pub(super) struct SqliteDriver {
    pub(super) conn: Connection,
    /// Dropped after the connection is closed. `None` while this process forks.
    pub(super) open: Option<OpenGuard>,
    pub(super) _registration: Registration,
    pub(super) path: PathBuf,
    /// Selects the rows to list, and the namespace of counters and events.
    pub(super) keys: KeySpace,
    pub(super) busy_timeout: BusyTimeout,
    pub(super) boot: i64,
    pub(super) liveness: Arc<Liveness>,
    pub(super) watch: Arc<DeathWatch>,
    pub(super) pushes: PushSender,
    pub(super) limits: Limits,
    pub(super) waiters: LocalWaiters,
    /// Off only in tests that compare answers step by step.
    pub(super) checks_holders: bool,
    pub(super) reserve: DiskReserve,
    pub(super) garbage: GarbageProgress,
    pub(super) sharing: Sharing,
    /// The files that the connection has open.
    pub(super) open_files: OpenFiles,
    /// The thread that reads our FIFO.
    pub(super) listener: Option<JoinHandle<()>>,
}

/// A reply of the fast path, sent after its transaction is committed.
enum FastReply {
    Fence(u64),
    Released,
    Renewed(usize),
}

impl SqliteDriver {
    /// Serves until the store is closed or dropped.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        let mut closing = None;
        while let Ok(first) = commands.recv() {
            let mut batch = vec![first];
            while batch.len() < BATCH_MAX {
                match commands.try_recv() {
                    Ok(command) => batch.push(command),
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                }
            }
            let batch = self.unless_displaced(batch);
            let batch = self.serve_bindings(batch);
            for command in self.serve_fast(batch) {
                if let Command::Close(reply) = command {
                    closing = Some(reply);
                } else {
                    self.serve(command);
                }
            }
            if closing.is_some() {
                break;
            }
            self.watch_holders();
            self.maintain();
        }
        self.watch.stop(&self.liveness);
        // The thread has our FIFO open.
        let _ = self.listener.take().map(JoinHandle::join);
        self.liveness.leave();
        // Otherwise the files beside the database may belong to another one.
        if self.is_in_place() {
            self.maintain_on_close();
        }
        drop(self.conn);
        drop(self.open);
        if let Some(reply) = closing {
            let _ = reply.send(());
        }
    }

    /// Serves in one transaction what the fast path can, and returns the other commands.
    fn serve_fast(&mut self, batch: Vec<Command>) -> Vec<Command> {
        let plain = |c: &Command| matches!(c, Command::Try(..) | Command::Release(..) | Command::Renew(..));
        if batch.iter().filter(|c| plain(c)).count() < 2 || self.begin().is_err() {
            return batch;
        }
        let asks = batch.iter().any(|c| matches!(c, Command::Try(..)));
        let required = self.reserve.require(&self.conn, if asks { Need::More } else { Need::Less });
        let mut done = Vec::with_capacity(batch.len());
        for command in &batch {
            match self.run_fast(command) {
                Ok(answer) => done.push(answer),
                Err(_) => break,
            }
        }
        let whole = done.len() == batch.len();
        if !whole || required.is_err() || self.commit().is_err() {
            // Each command then runs on its own, which shows which one fails and why.
            roll_back(&self.conn);
            return batch;
        }
        self.committed();
        let answered = batch.into_iter().zip(done).filter_map(|(command, answer)| match answer {
            Some(answer) => command.answer(answer),
            None => Some(command),
        });
        answered.collect()
    }

    fn run_fast(&self, command: &Command) -> rusqlite::Result<Option<FastReply>> {
        let (conn, boot, me) = (&self.conn, self.boot, self.liveness.id());
        Ok(match command {
            Command::Try(call, reply) if call.asking.fenced && !reply.is_closed() => {
                fast_path::take(conn, boot, &call.name, &call.asking)?.map(FastReply::Fence)
            }
            Command::Release(name, token, _) => {
                fast_path::release(conn, me, name, token)?.then_some(FastReply::Released)
            }
            Command::Renew(renewals, _) => {
                let mut all = true;
                for (name, renewal) in renewals {
                    // If one fails, all are renewed again one by one. Renewing twice is harmless.
                    all &= fast_path::renew(conn, me, name, renewal)?;
                }
                all.then_some(FastReply::Renewed(renewals.len()))
            }
            _ => None,
        })
    }

    fn serve(&mut self, command: Command) {
        match command {
            Command::Try(call, reply) => {
                // A caller that has given up wants no lock any more.
                if !reply.is_closed() {
                    let _ = reply.send(self.try_acquire(&call));
                }
            }
            Command::Acquire(call, ticket, reply) => {
                if !reply.is_closed() {
                    let _ = reply.send(self.acquire(&call, ticket.map(|t| t.0)));
                }
            }
            Command::Release(name, token, reply) => drop(reply.send(self.release(&name, &token))),
            Command::Renew(renewals, reply) => drop(reply.send(self.renew(&renewals))),
            Command::Leave(name, token, reply) => drop(reply.send(self.leave(&name, &token))),
            Command::Create(creating, reply) => {
                if !reply.is_closed() {
                    let _ = reply.send(self.create_binding(&creating));
                }
            }
            Command::Change(changing, reply) => drop(reply.send(self.change_binding(&changing))),
            Command::Call(call) => call(Ok(self)),
            Command::Wake => self.read_messages(),
            Command::CheckHolders if self.checks_holders => {
                // Another process cannot wake us up if our FIFO was removed.
                self.read_messages();
                self.check_holders();
            }
            Command::CheckHolders => {}
            Command::CloseForFork => self.close_for_fork(),
            Command::Close(_) => {}
        }
    }

    /// Closes the file until the fork is over. Commands wait in the channel meanwhile.
    fn close_for_fork(&mut self) {
        // A placeholder without a file. It is replaced before any command runs.
        let placeholder = Connection::open_in_memory().expect("a database in memory");
        drop(std::mem::replace(&mut self.conn, placeholder));
        self.open = None;
        loop {
            let opened = OpenGuard::begin().and_then(|open| {
                let (conn, busy_timeout, _) = schema::open(&self.path, self.sharing)?;
                // Opens the maintenance lock again: a child inherits the old descriptor, and would share its lock.
                let reserve = DiskReserve::prepare(&conn, &busy_timeout, &self.path, self.sharing)?;
                self.open_files.reopened(&conn, &self.path)?;
                Ok((conn, busy_timeout, reserve, open))
            });
            match opened {
                Ok((conn, busy_timeout, reserve, open)) => {
                    (self.conn, self.busy_timeout, self.reserve, self.open) = (conn, busy_timeout, reserve, Some(open));
                    self.garbage = GarbageProgress::default();
                    return;
                }
                Err(error) => tracing::warn!(%error, "cannot reopen the database after a fork; retrying"),
            }
            thread::sleep(REOPEN_INTERVAL);
        }
    }

    /// Translates an error of this database.
    pub(super) fn store_error(&self, fault: Fault) -> StoreError {
        match fault {
            Fault::Sql(error) => sqlite_error(&self.path, &error),
            Fault::Store(error) => error,
        }
    }

    /// Whether the process that owns a lease is certainly dead.
    pub(super) fn is_dead(&self, inbox: Option<&InboxId>) -> bool {
        inbox.is_some_and(|inbox| self.liveness.is_gone(inbox))
    }
}

impl Command {
    /// A command that runs `run` on the driver thread and sends its result.
    pub(super) fn call<R: Send + 'static>(
        run: impl FnOnce(&mut SqliteDriver) -> Result<R, StoreError> + Send + 'static,
        reply: ReplySender<R>,
    ) -> Self {
        Self::Call(Box::new(move |driver| drop(reply.send(driver.and_then(run)))))
    }

    /// Sends the reply of the fast path. Hands the command back if the reply does not match it.
    fn answer(self, answer: FastReply) -> Option<Command> {
        match (self, answer) {
            (Self::Try(call, reply), FastReply::Fence(fence)) => {
                drop(reply.send(Ok(Try::Granted(call.grant(fence)))));
            }
            (Self::Release(_, _, reply), FastReply::Released) => drop(reply.send(Ok(Release::Released))),
            (Self::Renew(_, reply), FastReply::Renewed(n)) => drop(reply.send(vec![Renewed::Renewed; n])),
            (other, _) => return Some(other),
        }
        None
    }
}

//! The commands for the driver thread, and the loop that serves them.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread::{self, JoinHandle};

use rusqlite::Connection;
use tokio::sync::oneshot;

use super::bindings::{Changing, Creating};
use super::disk_reserve::{DiskReserve, Need};
use super::driver::{Fault, GarbageProgress, SqliteDriver};
use super::fast_path;
use super::forking::OpenGuard;
use super::row::Key;
use super::schema;
use super::transaction::roll_back;
use super::waiters::AcquireCall;
use crate::clock::Moment;
use crate::facts::Token;
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
    /// A second went by while attempts of ours wait, or a holder died.
    CheckHolders,
    /// This process forks: closes the file, and reopens it after the fork.
    CloseForFork,
    Close(oneshot::Sender<()>),
}

/// A reply of the fast path, sent after its transaction is committed.
enum FastReply {
    Fence(u64),
    Released,
    Renewed(usize),
}

/// The answer to a change of a binding in a batch.
enum BindingReply {
    Create(Create),
    Change(Changed),
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
            Command::Try(call, reply) if call.asking.contender.fenced && !reply.is_closed() => {
                fast_path::take(conn, boot, &call.name, &call.asking.contender)?.map(FastReply::Fence)
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
                    let _ = reply.send(self.acquire(&call, ticket));
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

    /// Carries out the changes of bindings in a batch in one transaction, so that they share one sync of the disk, and
    /// returns the other commands. If one fails, returns all of them, to be carried out one by one.
    pub(super) fn serve_bindings(&mut self, batch: Vec<Command>) -> Vec<Command> {
        let changes = |c: &&Command| matches!(c, Command::Create(..) | Command::Change(..));
        if batch.iter().filter(changes).count() < 2 {
            return batch;
        }
        let bytes = batch.iter().map(|command| match command {
            Command::Create(creating, _) => creating.new.value.len(),
            Command::Change(changing, _) => changing.how.bytes(),
            _ => 0,
        });
        let need = Need::Bytes(bytes.sum());
        let done = self.durably(|driver| {
            driver.attempt(need, |driver| {
                driver.in_transaction(|driver| batch.iter().map(|c| driver.changed(c)).collect())
            })
        });
        let done: Vec<Option<BindingReply>> = match done {
            Ok(done) => done,
            Err(_) => return batch,
        };
        let answered = batch.into_iter().zip(done).filter_map(|(command, done)| match (command, done) {
            (Command::Create(_, reply), Some(BindingReply::Create(answer))) => (drop(reply.send(Ok(answer))), None).1,
            (Command::Change(_, reply), Some(BindingReply::Change(answer))) => (drop(reply.send(Ok(answer))), None).1,
            (command, _) => Some(command),
        });
        answered.collect()
    }

    fn changed(&mut self, command: &Command) -> Result<Option<BindingReply>, Fault> {
        Ok(match command {
            Command::Create(creating, reply) if !reply.is_closed() => {
                Some(BindingReply::Create(self.create_inside(creating)?))
            }
            Command::Change(changing, _) => Some(BindingReply::Change(self.change_inside(changing)?)),
            _ => None,
        })
    }

    /// Returns the commands if the database is in place, and answers them all if it was displaced. If that is unknown,
    /// rejects those that would take or renew a lease.
    pub(super) fn unless_displaced(&mut self, batch: Vec<Command>) -> Vec<Command> {
        let renews = batch.iter().any(|command| matches!(command, Command::Renew(..)));
        let now = Moment::now();
        if !renews && !self.open_files.is_due(now) {
            return batch;
        }
        let path = match self.open_files.look(now) {
            Ok(None) => return batch,
            Ok(Some(path)) => path,
            Err(error) => {
                let error = error.unsent();
                return batch.into_iter().filter_map(|command| refuse_unknown(command, &error)).collect();
            }
        };
        let text = format!(
            "{} was removed or replaced while this process had it open; start this program again to use what is there now",
            path.display()
        );
        let error = StoreError::new(StoreErrorKind::File, text).unsent();
        batch.into_iter().filter_map(|command| self.refuse_displaced(command, &error)).collect()
    }

    /// Whether the database is certainly in place.
    pub(super) fn is_in_place(&mut self) -> bool {
        matches!(self.open_files.look(Moment::now()), Ok(None))
    }

    fn refuse_displaced(&mut self, command: Command, error: &StoreError) -> Option<Command> {
        let error = || error.clone();
        match command {
            Command::Renew(renewals, reply) => drop(reply.send(vec![Renewed::Displaced; renewals.len()])),
            // Every lease in the displaced database is lost.
            Command::Release(_, _, reply) => drop(reply.send(Ok(Release::NotOwner))),
            Command::Leave(name, token, reply) => {
                self.waiters.remove(&name, &token);
                let _ = reply.send(Ok(Left::WasWaiting));
            }
            Command::Try(_, reply) => drop(reply.send(Err(error()))),
            Command::Acquire(_, _, reply) => drop(reply.send(Err(error()))),
            Command::Create(_, reply) => drop(reply.send(Err(error()))),
            Command::Change(_, reply) => drop(reply.send(Err(error()))),
            Command::Call(call) => call(Err(error())),
            // Waiters send their requests again at once, and get the error.
            Command::Wake | Command::CheckHolders => self.wake_waiters(),
            keep @ (Command::CloseForFork | Command::Close(_)) => return Some(keep),
        }
        None
    }

    fn wake_waiters(&mut self) {
        for token in self.waiters.take_tokens() {
            self.pushes.send(Push::LookAgain { token, after: Duration::ZERO });
        }
        self.watch.set_waiting(0, &self.liveness);
    }
}

/// Rejects a command that would take or renew a lease, and returns any other.
fn refuse_unknown(command: Command, error: &StoreError) -> Option<Command> {
    match command {
        Command::Renew(renewals, reply) => {
            drop(reply.send(vec![Renewed::Unknown(error.clone()); renewals.len()]));
        }
        Command::Try(_, reply) => drop(reply.send(Err(error.clone()))),
        Command::Acquire(_, _, reply) => drop(reply.send(Err(error.clone()))),
        other => return Some(other),
    }
    None
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
                drop(reply.send(Ok(Try::Granted(call.asking.grant(fence)))));
            }
            (Self::Release(_, _, reply), FastReply::Released) => drop(reply.send(Ok(Release::Released))),
            (Self::Renew(_, reply), FastReply::Renewed(n)) => drop(reply.send(vec![Renewed::Renewed; n])),
            (other, _) => return Some(other),
        }
        None
    }
}

//! The thread that owns the connection, and the commands it takes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread::{self, JoinHandle};

use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

use super::alive::Alive;
use super::bindings::{Changing, Creating};
use super::displaced::Opened;
use super::ear::Watch;
use super::fast;
use super::forking::{Listed, Open};
use super::modes::Sharing;
use super::room::{Need, Room, roll_back};
use super::row::Key;
use super::schema::{self, Patience, refused};
use super::waits::Waits;
use crate::clock::Moment;
use crate::event::LockEvent;
use crate::facts::{HolderId, KeySpace, Token};
use crate::machine::{Asking, FenceUnusable, InboxId, Limits};
use crate::store::*;

/// Commands taken off the channel at once: one transaction carries the plain ones among them.
const AT_ONCE: usize = 64;
/// The pause between two tries to open the file again.
const REOPEN_EVERY: Duration = Duration::from_millis(20);

pub(super) type Reply<R> = oneshot::Sender<Result<R, StoreError>>;

/// What the thread is asked to do. A reply nobody waits for any more is dropped: whoever gave up
/// undoes it with `leave`.
pub(super) enum Command {
    Try(Ask, Reply<Try>),
    Acquire(Ask, Option<Ticket>, Reply<Acquire>),
    Ticket(Reply<Ticket>),
    Release(Key, Token, Reply<Release>),
    Renew(Vec<(Key, Renewal)>, oneshot::Sender<Vec<Renewed>>),
    Leave(Key, Token, Reply<Left>),
    Evict(Key, HolderId, bool, Reply<Evicted>),
    AskToFinish(Key, HolderId, String, Reply<Asked>),
    Create(Box<Creating>, Reply<Create>),
    Read(String, Reply<Option<(Bound, Duration)>>),
    Change(Box<Changing>, Reply<Changed>),
    Tell(Vec<LockEvent>, Reply<()>),
    Count(Vec<(&'static str, u64)>, Reply<()>),
    Holder(Key, Reply<Option<Holder>>),
    List {
        prefix: String,
        after: Option<String>,
        limit: usize,
        reply: Reply<Page>,
    },
    Queue(Key, Reply<Vec<Waiter>>),
    Counters(Reply<Vec<(String, u64)>>),
    Events {
        after: Option<i64>,
        reply: Reply<(i64, Vec<LockEvent>)>,
    },
    Check(Reply<String>),
    Checkup(Reply<Vec<Finding>>),
    /// Something was written into our FIFO.
    Heard,
    /// A second went by while we wait, or a holder died.
    LookAround,
    Expire(Key, std::sync::mpsc::Sender<()>),
    Provisional(u64),
    LooksAround(bool),
    /// Closes the file, and opens it again when that is possible: this process forks.
    StandAside,
    Close(oneshot::Sender<()>),
}

/// An attempt as it came in.
#[derive(Clone)]
pub(super) struct Ask {
    pub(super) name: Key,
    pub(super) asking: Asking,
    pub(super) lasts: Duration,
    pub(super) asked_at: Moment,
}

impl Ask {
    pub(super) fn grant(&self, fence: u64) -> Grant {
        let fence = self.asking.fenced.then_some(Fence::new(fence));
        Grant { fence, asked_at: self.asked_at, lasts: self.lasts }
    }
}

/// Why a command could not be carried out.
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

/// The thread's own.
pub(super) struct Driver {
    pub(super) conn: Connection,
    /// After the connection: it is told when that is closed. `None` while this process forks.
    pub(super) open: Option<Open>,
    pub(super) _listed: Listed,
    pub(super) path: PathBuf,
    /// Which rows are ours to list, and under which namespace we count and tell.
    pub(super) keys: KeySpace,
    pub(super) patience: Patience,
    pub(super) boot: i64,
    pub(super) alive: Arc<Alive>,
    pub(super) watch: Arc<Watch>,
    pub(super) pushes: mpsc::UnboundedSender<Push>,
    pub(super) limits: Limits,
    pub(super) waits: Waits,
    /// Off only where a test compares what is asked and nothing else.
    pub(super) looks_around: bool,
    pub(super) room: Room,
    pub(super) sharing: Sharing,
    /// Which files the connection has open.
    pub(super) opened: Opened,
    /// The thread that listens at our FIFO.
    pub(super) listener: Option<JoinHandle<()>>,
}

/// An answer of the fast path, sent once its transaction is committed.
enum Plain {
    Fence(u64),
    Released,
    Renewed(usize),
}

impl Driver {
    /// Serves until the store is closed or dropped.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        let mut closing = None;
        while let Ok(first) = commands.recv() {
            let mut batch = vec![first];
            while batch.len() < AT_ONCE {
                match commands.try_recv() {
                    Ok(command) => batch.push(command),
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                }
            }
            let batch = self.unless_displaced(batch);
            let batch = self.serve_bindings(batch);
            for command in self.serve_plain(batch) {
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
            self.tidy();
        }
        self.watch.stop(&self.alive);
        // It has our FIFO open.
        let _ = self.listener.take().map(JoinHandle::join);
        self.alive.leave();
        // Else the files beside it may belong to another database.
        if self.is_in_place() {
            self.tidy_on_leaving();
        }
        drop(self.conn);
        drop(self.open);
        if let Some(reply) = closing {
            let _ = reply.send(());
        }
    }

    /// Carries out in one transaction what the fast path can; hands back the rest.
    fn serve_plain(&mut self, batch: Vec<Command>) -> Vec<Command> {
        let plain = |c: &Command| matches!(c, Command::Try(..) | Command::Release(..) | Command::Renew(..));
        if batch.iter().filter(|c| plain(c)).count() < 2 || self.begin().is_err() {
            return batch;
        }
        let asks = batch.iter().any(|c| matches!(c, Command::Try(..)));
        let demanded = self.room.demand(&self.conn, if asks { Need::More } else { Need::Less });
        let mut done = Vec::with_capacity(batch.len());
        for command in &batch {
            match self.plain(command) {
                Ok(answer) => done.push(answer),
                Err(_) => break,
            }
        }
        let whole = done.len() == batch.len();
        if !whole || demanded.is_err() || self.commit().is_err() {
            // Each on its own, where it can be seen which one fails and why.
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

    fn plain(&self, command: &Command) -> rusqlite::Result<Option<Plain>> {
        let (conn, boot, me) = (&self.conn, self.boot, self.alive.id());
        Ok(match command {
            Command::Try(ask, reply) if ask.asking.fenced && !reply.is_closed() => {
                fast::take(conn, boot, &ask.name, &ask.asking)?.map(Plain::Fence)
            }
            Command::Release(name, token, _) => fast::release(conn, me, name, token)?.then_some(Plain::Released),
            Command::Renew(renewals, _) => {
                let mut all = true;
                for (name, renewal) in renewals {
                    // Those that fail are asked again one by one; renewing twice does no harm.
                    all &= fast::renew(conn, me, name, renewal)?;
                }
                all.then_some(Plain::Renewed(renewals.len()))
            }
            _ => None,
        })
    }

    fn serve(&mut self, command: Command) {
        match command {
            Command::Try(ask, reply) => {
                // Whoever gave up before we began wants nothing any more.
                if !reply.is_closed() {
                    let _ = reply.send(self.try_acquire(&ask));
                }
            }
            Command::Acquire(ask, ticket, reply) => {
                if !reply.is_closed() {
                    let _ = reply.send(self.acquire(&ask, ticket.map(|t| t.0)));
                }
            }
            Command::Ticket(reply) => drop(reply.send(self.ticket())),
            Command::Release(name, token, reply) => drop(reply.send(self.release(&name, &token))),
            Command::Renew(renewals, reply) => drop(reply.send(self.renew(&renewals))),
            Command::Leave(name, token, reply) => drop(reply.send(self.leave(&name, &token))),
            Command::Evict(name, holder, force, reply) => drop(reply.send(self.evict(&name, holder, force))),
            Command::AskToFinish(name, holder, reason, reply) => {
                let _ = reply.send(self.ask_to_finish(&name, holder, &reason));
            }
            Command::Create(creating, reply) => {
                if !reply.is_closed() {
                    let _ = reply.send(self.create_binding(&creating));
                }
            }
            Command::Read(key, reply) => drop(reply.send(self.read_binding(&key))),
            Command::Change(changing, reply) => drop(reply.send(self.change_binding(&changing))),
            Command::Tell(events, reply) => drop(reply.send(self.tell(&events))),
            Command::Count(deltas, reply) => drop(reply.send(self.count(&deltas))),
            Command::Holder(name, reply) => drop(reply.send(self.holder(&name))),
            Command::List { prefix, after, limit, reply } => {
                let _ = reply.send(self.list(&prefix, after.as_deref(), limit));
            }
            Command::Queue(name, reply) => drop(reply.send(self.queue(&name))),
            Command::Counters(reply) => drop(reply.send(self.counters())),
            Command::Events { after, reply } => drop(reply.send(self.events(after))),
            Command::Check(reply) => drop(reply.send(self.check())),
            Command::Checkup(reply) => drop(reply.send(Ok(self.checkup()))),
            Command::Heard => self.read_messages(),
            Command::LookAround if self.looks_around => {
                // Another process cannot wake us up where our FIFO was removed.
                self.read_messages();
                self.look_around();
            }
            Command::LookAround => {}
            Command::Expire(name, done) => {
                let _ = self.conn.execute("UPDATE locks SET ends = 0 WHERE name = ?1", [name.as_str()]);
                let _ = done.send(());
            }
            Command::Provisional(ms) => self.limits.provisional_ms = ms,
            Command::LooksAround(looks) => self.looks_around = looks,
            Command::StandAside => self.stand_aside(),
            Command::Close(_) => {}
        }
    }

    /// What is asked meanwhile waits in the channel.
    fn stand_aside(&mut self) {
        // Nothing of SQLite's is open then. It is not used before it is exchanged again.
        let nothing = Connection::open_in_memory().expect("a database in memory");
        drop(std::mem::replace(&mut self.conn, nothing));
        self.open = None;
        loop {
            let opened = Open::begin().and_then(|open| {
                let (conn, patience, _) = schema::open(&self.path, self.sharing)?;
                // With a lock file of its own: a child has the old one, and would share what is locked in it.
                let room = Room::prepare(&conn, &patience, &self.path, self.sharing)?;
                self.opened.reopened(&conn, &self.path)?;
                Ok((conn, patience, room, open))
            });
            match opened {
                Ok((conn, patience, room, open)) => {
                    (self.conn, self.patience, self.room, self.open) = (conn, patience, room, Some(open));
                    return;
                }
                Err(error) => tracing::warn!(%error, "the file cannot be opened again yet"),
            }
            thread::sleep(REOPEN_EVERY);
        }
    }

    /// An error of this file, in our words.
    pub(super) fn refuse(&self, fault: Fault) -> StoreError {
        match fault {
            Fault::Sql(error) => refused(&self.path, &error),
            Fault::Store(error) => error,
        }
    }

    /// Whether the owner of a lease is certainly gone.
    pub(super) fn is_dead(&self, inbox: Option<&InboxId>) -> bool {
        inbox.is_some_and(|inbox| self.alive.is_gone(inbox))
    }
}

impl Command {
    fn answer(self, answer: Plain) -> Option<Command> {
        match (self, answer) {
            (Self::Try(ask, reply), Plain::Fence(fence)) => {
                drop(reply.send(Ok(Try::Granted(ask.grant(fence)))));
            }
            (Self::Release(_, _, reply), Plain::Released) => drop(reply.send(Ok(Release::Released))),
            (Self::Renew(_, reply), Plain::Renewed(n)) => drop(reply.send(vec![Renewed::Renewed; n])),
            (other, _) => return Some(other),
        }
        None
    }
}

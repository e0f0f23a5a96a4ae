//! A task that waits: for one lock, or for some of several, whichever come first.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::lease_cell::NewLease;
use super::lock;
use crate::error::Error;
use crate::guard::Guard;
use crate::store::Ticket;

/// A task's place in a room.
pub(crate) struct Seat {
    pub(crate) lease: NewLease,
    /// The pause between two polls that the task asked for.
    pub(crate) retry_every: Option<Duration>,
    /// The task's own place in the store's order, drawn before. Without one the room is given a place when
    /// it asks.
    pub(crate) ticket: Option<Ticket>,
    pub(crate) reply: Reply,
}

/// The way back to a task that waits.
pub(crate) enum Reply {
    /// The guard itself travels: should the task be gone when it arrives, dropping it gives the lock back.
    One(oneshot::Sender<Result<Guard, Error>>),
    /// One of several seats of a task. The number says which.
    Some(Arc<Basket>, usize),
}

impl Reply {
    /// The task is gone, or has what it wants.
    pub(crate) fn is_closed(&self) -> bool {
        match self {
            Self::One(reply) => reply.is_closed(),
            Self::Some(basket, _) => basket.is_closed(),
        }
    }

    /// Whether the task takes a lock from here: to be asked once, and followed by [`Reply::send`].
    pub(crate) fn accepts(&self) -> bool {
        match self {
            Self::One(reply) => !reply.is_closed(),
            Self::Some(basket, _) => basket.accepts(),
        }
    }

    pub(crate) fn send(self, answer: Result<Guard, Error>) {
        match self {
            Self::One(reply) => drop(reply.send(answer)),
            Self::Some(basket, which) => drop(basket.into.send((which, answer))),
        }
    }
}

/// What a task that sits in several rooms is given by them. Several rooms may be granted their lock at the
/// same moment: each asks first, so that the task gets no more than it wants.
pub(crate) struct Basket {
    wants: Mutex<usize>,
    into: mpsc::UnboundedSender<(usize, Result<Guard, Error>)>,
}

/// What arrives, and from which seat.
pub(crate) type Arrivals = mpsc::UnboundedReceiver<(usize, Result<Guard, Error>)>;

impl Basket {
    pub(crate) fn wanting(wants: usize) -> (Arc<Self>, Arrivals) {
        let (into, arrivals) = mpsc::unbounded_channel();
        (Arc::new(Self { wants: Mutex::new(wants), into }), arrivals)
    }

    /// What was given did not last.
    pub(crate) fn want_one_more(&self) {
        *lock(&self.wants) += 1;
    }

    /// Nothing more, whatever is missing.
    pub(crate) fn close(&self) {
        *lock(&self.wants) = 0;
    }

    fn is_closed(&self) -> bool {
        self.into.is_closed() || *lock(&self.wants) == 0
    }

    fn accepts(&self) -> bool {
        let mut wants = lock(&self.wants);
        if self.into.is_closed() || *wants == 0 {
            return false;
        }
        *wants -= 1;
        true
    }
}

//! A task that waits: for one lock, or for some of several, whichever come first.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::lease_cell::NewLease;
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

/// The way back to a task that waits. The guard itself travels: should the task be gone when it arrives, or
/// have what it wants, dropping it gives the lock back.
pub(crate) enum Reply {
    One(oneshot::Sender<Result<Guard, Error>>),
    /// One of several seats of a task. The number says which.
    Some(mpsc::UnboundedSender<Arrival>, usize),
}

/// What a task that sits in several rooms is given, and by which of them.
pub(crate) type Arrival = (usize, Result<Guard, Error>);

impl Reply {
    /// The task is gone, or has what it wants.
    pub(crate) fn is_closed(&self) -> bool {
        match self {
            Self::One(reply) => reply.is_closed(),
            Self::Some(reply, _) => reply.is_closed(),
        }
    }

    pub(crate) fn send(self, answer: Result<Guard, Error>) {
        match self {
            Self::One(reply) => drop(reply.send(answer)),
            Self::Some(reply, which) => drop(reply.send((which, answer))),
        }
    }
}

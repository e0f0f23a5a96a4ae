//! What a call asks for.

use std::time::Duration;

use crate::clock::{Moment, wall_ms};
use crate::facts::{LockName, Owner, Token, Ttl};
use crate::options::OnUnavailable;
use crate::store::AcquireRequest;

/// A checked request, with the defaults of its manager.
#[derive(Debug, Clone)]
pub(crate) struct Wish {
    pub(crate) name: LockName,
    pub(crate) ttl: Ttl,
    pub(crate) owner: Owner,
    pub(crate) fenced: bool,
    /// `None`: never renewed.
    pub(crate) renew_every: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) wait: Wait,
    pub(crate) retry_every: Option<Duration>,
    pub(crate) on_unavailable: OnUnavailable,
}

/// A call may overrun its deadline by this much to hear the answer to a request already sent.
const GRACE: Duration = Duration::from_millis(150);

/// How long a call waits for a lock that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    Not,
    UpTo(Duration),
    Forever,
}

impl Wait {
    pub(super) fn deadline(self, began: Moment) -> Option<Moment> {
        match self {
            Self::UpTo(wait) => Some(began + wait),
            Self::Not | Self::Forever => None,
        }
    }

    /// When a call is answered at the latest. A store has `request_timeout` for one answer; a call that waits gives it
    /// until its deadline.
    pub(super) fn answer_by(self, began: Moment, request_timeout: Duration) -> Option<Moment> {
        match self {
            Self::Not => Some(began + request_timeout),
            Self::UpTo(wait) => Some(began + wait + GRACE),
            Self::Forever => None,
        }
    }
}

impl Wish {
    /// The claim of this request under a token. `listens`: the store may grant it by a message to this process.
    pub(super) fn claim(&self, token: Token, listens: bool) -> AcquireRequest {
        AcquireRequest {
            name: self.name.clone(),
            token,
            ttl: self.ttl,
            owner: self.owner.clone(),
            fenced: self.fenced,
            listens,
            since_ms: wall_ms(),
        }
    }
}

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::event::Observer;
use crate::facts::{KeySpace, Owner, Ttl};

/// How a manager behaves. The defaults are argued beside each field.
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// Namespace and raw names.
    pub keys: KeySpace,
    /// The lease of a request that names none.
    pub ttl: Ttl,
    /// Who this process is, for people.
    pub owner: Owner,
    /// Whether the store tells waiters when it is their turn. Off: they poll.
    pub events: bool,
    /// The first pause of a waiter that polls. 50 ms: a person does not notice it, a server
    /// neither.
    pub poll_interval: Duration,
    /// The longest pause of a waiter that polls; each one is twice the last until here. At most a
    /// second, because a waiter that has not asked for three is passed over.
    pub max_poll_interval: Duration,
    /// A waiter that was told nothing asks again by itself after this at the latest. 30 s is the
    /// longest it ever pauses anyway: only a shorter time changes anything.
    pub ask_again_within: Duration,
    /// How long one request may go unanswered. 2 s: a healthy store answers in milliseconds, one
    /// that needs seconds is as good as down.
    pub answer_within: Duration,
    /// Whether a server that cannot be reached yet is one that was lost: `connect` succeeds, it is tried again
    /// until it is there, and requests meanwhile end as [`on_unavailable`](Self::on_unavailable) says. For
    /// programs that begin before their server does. Off: `connect` says so.
    pub connect_later: bool,
    /// How long a waiter goes on while the store cannot be reached. 10 s: a restart or failover
    /// is over by then.
    pub patience: Duration,
    /// A renewing lease is renewed at least this often, however long its ttl: its heartbeat.
    pub heartbeat: Duration,
    /// How often a failed release is tried again before other means are used.
    pub max_release_retries: u32,
    /// How long to wait before a release by other means.
    pub emergency_release_delay: Duration,
    /// Whether a release is done by other means at all when the usual ones fail.
    pub emergency_release: bool,
    /// What happens to work when the store cannot be reached.
    pub on_unavailable: OnUnavailable,
    /// Where releases that failed by all means are kept; `None` keeps no journal.
    pub journal: Option<PathBuf>,
    /// Gets every transition of this process.
    pub observer: Option<Arc<dyn Observer>>,
}

/// What happens to a request when the store cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OnUnavailable {
    /// It fails: without a store nobody can promise that no one else is at work.
    #[default]
    FailClosed,
    /// It goes on without protection: the guard says so, a warning and a journal entry are written.
    FailOpen,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            keys: KeySpace::default(),
            ttl: Ttl::default(),
            owner: Owner::default(),
            events: true,
            poll_interval: Duration::from_millis(50),
            max_poll_interval: Duration::from_secs(1),
            ask_again_within: Duration::from_secs(30),
            answer_within: Duration::from_secs(2),
            connect_later: false,
            patience: Duration::from_secs(10),
            heartbeat: Duration::from_secs(60),
            max_release_retries: 3,
            emergency_release_delay: Duration::from_secs(5),
            emergency_release: true,
            on_unavailable: OnUnavailable::FailClosed,
            journal: crate::journal::default_dir(),
            observer: None,
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("keys", &self.keys)
            .field("ttl", &self.ttl)
            .field("owner", &self.owner)
            .field("on_unavailable", &self.on_unavailable)
            .finish_non_exhaustive()
    }
}

//! What happened to locks: [`LockEvent`] for the whole fleet, [`Transition`] for this process.
//!
//! [`LockManager::events`](crate::LockManager::events) subscribes to the events of the fleet. An [`Observer`] in the
//! [`Options`](crate::Options) receives the transitions of this process, for its metrics. Neither carries a secret.

pub(crate) mod lock_event;
pub(crate) mod transition;

pub use lock_event::{EventKind, LockEvent};
pub use transition::{Observer, ReleaseLayer, Transition};

//! Conversions from the state machine's types to those of the store's operations, shared by the stores that run it.

use std::time::Duration;

use super::{Grant, Holder, Push, StoreError, StoreErrorKind};
use crate::clock::Moment;
use crate::facts::Fence;
use crate::machine::{FenceUnusable, Flag, Message, Slot};

/// Returns the holder in a slot.
pub(crate) fn view(slot: &Slot, now_ms: u64) -> Option<Holder> {
    let left = |ends_ms: Option<u64>| ends_ms.map(|end| Duration::from_millis(end.saturating_sub(now_ms)));
    let id = slot.holder_id()?;
    Some(match slot {
        Slot::Free => return None,
        Slot::Held(held) => Holder {
            id,
            owner: held.owner.clone(),
            fence: (held.fence != 0).then_some(Fence::new(held.fence)),
            since_ms: held.since_ms,
            ttl: Some(Duration::from_millis(held.ttl_ms)),
            ttl_left: left(held.ends_ms),
            revoked: held.flag == Flag::Revoked,
            foreign: false,
            listens: held.inbox.is_some(),
            connected: None,
        },
        Slot::Foreign { value, ends_ms } => Holder::foreign(value.as_bytes(), left(*ends_ms)),
    })
}

impl Message {
    /// Converts the message for the process that receives it.
    pub(crate) fn into_push(self, asked_at: Moment) -> Push {
        match self {
            Self::Granted { token, fence, lasts_ms } => {
                let grant = Grant { fence: Some(Fence::new(fence)), asked_at, lasts: Duration::from_millis(lasts_ms) };
                Push::Granted { token, grant }
            }
            Self::LookAgain { token, after_ms } => Push::LookAgain { token, after: Duration::from_millis(after_ms) },
            Self::Revoked { token } => Push::Revoked { token },
            Self::Finish { token, reason } => Push::Finish { token, reason },
        }
    }
}

impl From<FenceUnusable> for StoreError {
    fn from(_: FenceUnusable) -> Self {
        StoreErrorKind::FenceUnusable.into()
    }
}

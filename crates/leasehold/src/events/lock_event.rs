//! The events that stores publish for the whole fleet.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::clock::wall_ms;
use crate::facts::{Fence, HolderId, LockName};

/// Something that happened to a lock, in any process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockEvent {
    /// What happened.
    pub kind: EventKind,
    /// The lock.
    pub name: String,
    /// The owner of its holder.
    pub owner: String,
    /// The holder's public id.
    pub holder_id: String,
    /// The holder's fence, if it has one.
    pub fence: Option<u64>,
    /// The time, in wall-clock milliseconds.
    pub at_ms: u64,
    /// The reason: `normal`, `emergency`, `forced`, `expired`, or the text that was given with an eviction.
    pub reason: String,
}

/// The kinds of [`LockEvent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EventKind {
    /// A lease was granted (published once it has lasted half a second).
    Granted,
    /// The holder released the lock.
    Released,
    /// The holder lost the lock.
    Lost,
    /// The lock was revoked: its holder was notified and cannot renew.
    Revoked,
    /// The lock was taken by force: the lease ended at once.
    Forced,
    /// The holder was asked to finish soon.
    AskedToFinish,
    /// Something went wrong that an operator should know: see [`LockEvent::alert`].
    Alert,
}

/// The kinds of [`EventKind::Alert`]. The `reason` of an event begins with its kind, which is published and stored as text, and
/// alert rules use it. So `gpu_lock_emergency_release` is the kind for every lock.
pub(crate) mod alert_kind {
    pub(crate) const EMERGENCY_RELEASE: &str = "gpu_lock_emergency_release";
    pub(crate) const SCRIPT_ERROR: &str = "lua_script_error";
    pub(crate) const RELEASE_JOURNALLED: &str = "release_journalled";
}

/// The longest event that is read, in bytes of JSON. Events of leasehold are far shorter.
const EVENT_BYTES_MAX: usize = 32 * 1024;
/// Longer owners and reasons are cut.
const OWNER_CHARS_MAX: usize = 256;
const REASON_CHARS_MAX: usize = 2_048;

static DROPPED: AtomicU64 = AtomicU64::new(0);

impl LockEvent {
    /// Creates an event of this moment.
    pub(crate) fn new(
        kind: EventKind,
        name: &LockName,
        holder: HolderId,
        owner: &str,
        fence: Option<Fence>,
        reason: &str,
    ) -> Self {
        Self {
            kind,
            name: name.to_string(),
            owner: owner.to_owned(),
            holder_id: holder.to_string(),
            fence: fence.map(Fence::get),
            at_ms: wall_ms(),
            reason: reason.to_owned(),
        }
    }

    /// Returns how many published events this process dropped: too long, unreadable, or not about a lock. Any client that may
    /// publish can send such events.
    pub fn dropped() -> u64 {
        DROPPED.load(Ordering::Relaxed)
    }

    /// Reads a published event. An event that is not valid is counted and dropped.
    pub(crate) fn read(json: &[u8]) -> Option<Self> {
        let read =
            Some(json).filter(|json| json.len() <= EVENT_BYTES_MAX).and_then(|json| serde_json::from_slice(json).ok());
        let read = read.and_then(Self::checked);
        if read.is_none() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        read
    }

    fn checked(mut self) -> Option<Self> {
        LockName::new(self.name.as_str()).ok()?;
        HolderId::parse(&self.holder_id).ok()?;
        for (text, most) in [(&mut self.owner, OWNER_CHARS_MAX), (&mut self.reason, REASON_CHARS_MAX)] {
            if let Some((end, _)) = text.char_indices().nth(most) {
                text.truncate(end);
            }
        }
        Some(self)
    }

    /// Splits the reason of an [`EventKind::Alert`] into its kind (`lua_script_error`, `gpu_lock_emergency_release`,
    /// `release_journalled`) and what went wrong.
    pub fn alert(&self) -> Option<(&str, &str)> {
        let (kind, detail) = self.reason.split_once(": ").unwrap_or((&self.reason, ""));
        (self.kind == EventKind::Alert).then_some((kind, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_events_are_dropped_and_long_texts_are_cut() {
        let json = |name: &str, holder: &str, owner: &str, reason: &str| {
            let fields = format!(r#""name":"{name}","holder_id":"{holder}","owner":"{owner}","reason":"{reason}""#);
            format!(r#"{{"kind":"released",{fields},"fence":1,"at_ms":5}}"#)
        };
        let holder = crate::facts::Token::random().holder_id().to_string();
        let good = LockEvent::read(json("a", &holder, "tts", "normal").as_bytes()).expect("an event");
        assert_eq!((good.name.as_str(), good.owner.as_str(), good.reason.as_str()), ("a", "tts", "normal"));
        let long = LockEvent::read(json("a", &holder, &"ä".repeat(3_000), &"x".repeat(9_000)).as_bytes()).expect("cut");
        assert_eq!((long.owner.chars().count(), long.reason.len()), (OWNER_CHARS_MAX, REASON_CHARS_MAX));
        let before = LockEvent::dropped();
        for bad in [
            json("", &holder, "o", "r"),
            json(&"n".repeat(20_000), &holder, "o", "r"),
            json("a", "nobody", "o", "r"),
            json("a", &holder, "o", &"x".repeat(EVENT_BYTES_MAX)),
            "[]".into(),
        ] {
            assert_eq!(LockEvent::read(bad.as_bytes()), None, "{bad:.100}");
        }
        assert!(LockEvent::dropped() >= before + 5, "counted");
    }
}

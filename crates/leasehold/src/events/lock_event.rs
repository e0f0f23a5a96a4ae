//! The events of a lock that the whole fleet can follow.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::clock::wall_ms;
use crate::facts::{Fence, HolderId, LockName};

/// Something that happened to a lock anywhere in the fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockEvent {
    /// What happened.
    pub kind: EventKind,
    /// To which lock.
    pub name: String,
    /// To whom.
    pub owner: String,
    /// The holder's public id.
    pub holder_id: String,
    /// Its fence, if it had one.
    pub fence: Option<u64>,
    /// When, in wall-clock milliseconds.
    pub at_ms: u64,
    /// Why: `normal`, `emergency`, `forced`, `expired` or the words of whoever did it.
    pub reason: String,
}

/// The kinds of [`LockEvent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EventKind {
    /// A lease was granted (published once it has lasted half a second).
    Granted,
    /// A holder gave it back.
    Released,
    /// A holder lost it.
    Lost,
    /// It was revoked: its holder has been told to stop.
    Revoked,
    /// It was taken away by force.
    Forced,
    /// Its holder was asked to come to an end soon.
    AskedToFinish,
    /// Something went wrong that a person should know of: see [`LockEvent::alert`].
    Alert,
}

/// The kinds of [`EventKind::Alert`]. An event's `reason` starts with its kind and is published and stored as text, and
/// alert rules name it. So `gpu_lock_emergency_release` is the kind for every lock, and it is here: behind this place the
/// text has left the process, and servers and followers of other versions read it.
pub(crate) mod alert_kind {
    pub(crate) const EMERGENCY_RELEASE: &str = "gpu_lock_emergency_release";
    pub(crate) const SCRIPT_ERROR: &str = "lua_script_error";
    pub(crate) const RELEASE_JOURNALLED: &str = "release_journalled";
}

/// The longest event that is read, in bytes of JSON. Ours are far shorter.
const MOST_BYTES: usize = 32 * 1024;
/// The longest owner and reason that are kept of an event.
const OWNER_CHARS: usize = 256;
const REASON_CHARS: usize = 2_048;

static DROPPED: AtomicU64 = AtomicU64::new(0);

impl LockEvent {
    /// An event of this moment.
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

    /// How many published events this process dropped: too long, unreadable, or about something that is no lock. Anybody
    /// who may publish can send such.
    pub fn dropped() -> u64 {
        DROPPED.load(Ordering::Relaxed)
    }

    /// Reads a published event. `None`: it was dropped, and counted.
    pub(crate) fn read(json: &[u8]) -> Option<Self> {
        let read =
            Some(json).filter(|json| json.len() <= MOST_BYTES).and_then(|json| serde_json::from_slice(json).ok());
        let read = read.and_then(Self::checked);
        if read.is_none() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        read
    }

    fn checked(mut self) -> Option<Self> {
        LockName::new(self.name.as_str()).ok()?;
        HolderId::parse(&self.holder_id).ok()?;
        for (text, most) in [(&mut self.owner, OWNER_CHARS), (&mut self.reason, REASON_CHARS)] {
            if let Some((end, _)) = text.char_indices().nth(most) {
                text.truncate(end);
            }
        }
        Some(self)
    }

    /// Of an [`EventKind::Alert`]: which kind (`lua_script_error`, `gpu_lock_emergency_release`, `release_journalled`), and
    /// what went wrong. Its `reason` is both, with a colon between.
    pub fn alert(&self) -> Option<(&str, &str)> {
        let (kind, detail) = self.reason.split_once(": ").unwrap_or((&self.reason, ""));
        (self.kind == EventKind::Alert).then_some((kind, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_events_about_locks_are_read_and_none_is_long() {
        let json = |name: &str, holder: &str, owner: &str, reason: &str| {
            let fields = format!(r#""name":"{name}","holder_id":"{holder}","owner":"{owner}","reason":"{reason}""#);
            format!(r#"{{"kind":"released",{fields},"fence":1,"at_ms":5}}"#)
        };
        let holder = crate::facts::Token::random().holder_id().to_string();
        let good = LockEvent::read(json("a", &holder, "tts", "normal").as_bytes()).expect("an event");
        assert_eq!((good.name.as_str(), good.owner.as_str(), good.reason.as_str()), ("a", "tts", "normal"));
        let long = LockEvent::read(json("a", &holder, &"ä".repeat(3_000), &"x".repeat(9_000)).as_bytes()).expect("cut");
        assert_eq!((long.owner.chars().count(), long.reason.len()), (OWNER_CHARS, REASON_CHARS));
        let before = LockEvent::dropped();
        for bad in [
            json("", &holder, "o", "r"),
            json(&"n".repeat(20_000), &holder, "o", "r"),
            json("a", "nobody", "o", "r"),
            json("a", &holder, "o", &"x".repeat(MOST_BYTES)),
            "[]".into(),
        ] {
            assert_eq!(LockEvent::read(bad.as_bytes()), None, "{bad:.100}");
        }
        assert!(LockEvent::dropped() >= before + 5, "counted");
    }
}

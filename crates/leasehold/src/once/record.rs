//! What stands in the store about work that is done once: a line of JSON, and after it the result.

use serde::{Deserialize, Serialize};

use crate::clock::wall_ms;

/// How far the work is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// Somebody is at it, or was, and died over it: the lock says which.
    Running,
    /// Its result follows.
    Done,
}

/// The first line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    pub(super) state: State,
    /// Who, for people.
    pub(super) by: String,
    /// Since when, or when it was done: wall-clock milliseconds.
    pub(super) at_ms: u64,
    /// The fingerprint of what it was asked with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) payload: Option<String>,
}

impl Head {
    pub(super) fn new(state: State, by: String, payload: Option<String>) -> Self {
        Self { state, by, at_ms: wall_ms(), payload }
    }

    pub(super) fn with(&self, result: &[u8]) -> Vec<u8> {
        let mut record = serde_json::to_vec(self).expect("a head is JSON");
        record.push(b'\n');
        record.extend_from_slice(result);
        record
    }
}

/// A record in its two parts; `None` when it is none of ours.
pub(super) fn parse(record: &[u8]) -> Option<(Head, &[u8])> {
    let end = record.iter().position(|byte| *byte == b'\n')?;
    Some((serde_json::from_slice(&record[..end]).ok()?, &record[end + 1..]))
}

/// Tells payloads apart. Whoever sends the same id again with another one made a mistake; it is not a seal
/// against somebody who wants two payloads to look the same.
pub(super) fn fingerprint(payload: &[u8]) -> String {
    sha1_smol::Sha1::from(payload).digest().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_whatever_the_result_is() {
        let head = Head::new(State::Done, "me\n@here".into(), Some(fingerprint(b"x")));
        for result in [&b""[..], b"\n", b"{\"a\":1}\n\xff\0"] {
            let record = head.with(result);
            assert_eq!(parse(&record), Some((head.clone(), result)));
        }
        assert_eq!(parse(b"no line"), None);
        assert_eq!(parse(b"[]\n"), None);
    }
}

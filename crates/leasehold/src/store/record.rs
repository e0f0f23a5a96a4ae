//! The record of work that is done once: a line of JSON, followed by the result. Stores read its state and fence to
//! decide what a runner may overwrite.

use serde::{Deserialize, Serialize};

use super::bindings::{Bound, Step};
use crate::clock::wall_ms;
use crate::facts::ClaimId;

/// The state of the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// A runner works on it, or died: the lock shows which.
    Running,
    /// The work is done, and its result follows.
    Done,
    /// The work is done, but its result cannot be stored. The reason follows, as text.
    Unstored,
}

/// The first line of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Head {
    pub(crate) state: State,
    /// The owner of the runner.
    pub(crate) by: String,
    /// When the work began or ended, in wall-clock milliseconds.
    pub(crate) at_ms: u64,
    /// The fence of the runner's lease. Records of earlier builds have none, which counts as 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fence: Option<u64>,
    /// The fingerprint of the payload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) payload: Option<String>,
}

impl Head {
    pub(crate) fn new(state: State, by: String, fence: u64, payload: Option<String>) -> Self {
        Self { state, by, at_ms: wall_ms(), fence: Some(fence), payload }
    }

    /// Returns the record with this first line and a result.
    pub(crate) fn with(&self, result: &[u8]) -> Vec<u8> {
        let mut record = serde_json::to_vec(self).expect("a head is JSON");
        record.push(b'\n');
        record.extend_from_slice(result);
        record
    }
}

/// Splits a record into its two parts; `None` if it is not a record.
pub(crate) fn parse(record: &[u8]) -> Option<(Head, &[u8])> {
    let (line, result) = split(record)?;
    Some((serde_json::from_slice(line).ok()?, result))
}

/// The store's decision about a runner's step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordVerdict {
    /// Write the step, as this revision.
    Write { revision: u64 },
    /// The result of this runner is stored already: the step was sent twice.
    Already,
    /// Leave the record alone.
    Refuse,
}

/// Decides about a step, given the stored binding. A finished record is never replaced; a running one only by its own
/// runner, or by one with a higher fence. A runner with another payload does not begin: the id belongs to the first
/// payload, even if its runner died.
pub(crate) fn judge(step: &Step, found: Option<&Bound>) -> RecordVerdict {
    let Some(found) = found else { return RecordVerdict::Write { revision: 0 } };
    let ours = found.claim == step.claim;
    match standing(found) {
        Some(RecordStanding { state: State::Running, .. }) if ours => {
            RecordVerdict::Write { revision: found.revision + 1 }
        }
        Some(RecordStanding { state: State::Running, fence, payload }) if fence.unwrap_or(0) < step.fence => {
            let asked = if step.over { None } else { read_standing(&step.value).and_then(|asked| asked.payload) };
            match (payload, asked) {
                (Some(first), Some(asked)) if first != asked => RecordVerdict::Refuse,
                _ => RecordVerdict::Write { revision: 0 },
            }
        }
        Some(RecordStanding { state: State::Done | State::Unstored, .. }) if ours && step.over => {
            RecordVerdict::Already
        }
        _ => RecordVerdict::Refuse,
    }
}

/// Returns whether a runner may remove its record: it is the runner's own, and still running.
pub(crate) fn may_withdraw(claim: &ClaimId, found: &Bound) -> bool {
    found.claim == *claim && standing(found).is_some_and(|standing| standing.state == State::Running)
}

/// The fields that decide which runner may write.
#[derive(Deserialize)]
struct RecordStanding {
    state: State,
    #[serde(default)]
    fence: Option<u64>,
    #[serde(default)]
    payload: Option<String>,
}

fn standing(found: &Bound) -> Option<RecordStanding> {
    // A binding with a slot on a node is never a record.
    if found.node.is_some() { None } else { read_standing(&found.value) }
}

fn read_standing(record: &[u8]) -> Option<RecordStanding> {
    serde_json::from_slice(split(record)?.0).ok()
}

fn split(record: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = record.iter().position(|byte| *byte == b'\n')?;
    Some((&record[..end], &record[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{BindingKind, LockName, Retention};
    use crate::store::BindingId;

    #[test]
    fn a_record_is_read_back_whatever_the_result_is() {
        let head = Head::new(State::Done, "me\n@here".into(), 7, Some("fingerprint".into()));
        for result in [&b""[..], b"\n", b"{\"a\":1}\n\xff\0"] {
            let record = head.with(result);
            assert_eq!(parse(&record), Some((head.clone(), result)));
        }
        assert_eq!(parse(b"no line"), None);
        assert_eq!(parse(b"[]\n"), None);
    }

    #[test]
    fn a_record_of_an_earlier_build_has_no_fence() {
        let (head, _) = parse(b"{\"state\":\"running\",\"by\":\"a@b:1\",\"at_ms\":1}\n").expect("a record");
        assert_eq!((head.state, head.fence), (State::Running, None));
    }

    #[test]
    fn a_runner_writes_over_nothing_its_own_and_a_lower_fence() {
        let (ours, other) = (ClaimId::random(), ClaimId::random());
        let step = |over| Step {
            id: BindingId { kind: BindingKind::Results, id: LockName::new("x").expect("a name") },
            claim: ours.clone(),
            fence: 7,
            over,
            keep: Retention::new(Retention::MAX).expect("a time"),
            value: b"{\"state\":\"running\",\"payload\":\"p\"}\n".to_vec(),
        };
        let found = |claim: &ClaimId, line: &str| {
            let value = format!("{line}\nresult").into_bytes();
            Bound { claim: claim.clone(), revision: 3, keep: Retention::MAX, node: None, value }
        };
        let (anew, next) = (RecordVerdict::Write { revision: 0 }, RecordVerdict::Write { revision: 4 });
        for (claim, line, begins, ends) in [
            (&other, r#"{"state":"running"}"#, anew, anew),
            (&other, r#"{"state":"running","fence":6}"#, anew, anew),
            (&other, r#"{"state":"running","fence":6,"payload":"p"}"#, anew, anew),
            (&other, r#"{"state":"running","fence":6,"payload":"q"}"#, RecordVerdict::Refuse, anew),
            (&other, r#"{"state":"running","fence":7}"#, RecordVerdict::Refuse, RecordVerdict::Refuse),
            (&other, r#"{"state":"running","fence":8}"#, RecordVerdict::Refuse, RecordVerdict::Refuse),
            (&other, r#"{"state":"done","fence":6}"#, RecordVerdict::Refuse, RecordVerdict::Refuse),
            (&other, r#"{"state":"unstored","fence":6}"#, RecordVerdict::Refuse, RecordVerdict::Refuse),
            (&ours, r#"{"state":"running","fence":7}"#, next, next),
            (&ours, r#"{"state":"done","fence":7}"#, RecordVerdict::Refuse, RecordVerdict::Already),
            (&ours, r#"{"state":"unstored","fence":7}"#, RecordVerdict::Refuse, RecordVerdict::Already),
            (&ours, "no record", RecordVerdict::Refuse, RecordVerdict::Refuse),
        ] {
            let found = found(claim, line);
            assert_eq!((judge(&step(false), Some(&found)), judge(&step(true), Some(&found))), (begins, ends), "{line}");
            assert_eq!(may_withdraw(&ours, &found), *claim == ours && line.contains("running"), "{line}");
        }
        assert_eq!((judge(&step(false), None), judge(&step(true), None)), (anew, anew));
    }
}

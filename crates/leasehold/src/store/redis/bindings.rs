//! Bindings: a creation without a slot is plain commands in one write; every other change is a script.
//!
//! The value is `lh1 <claim> <revision> <keep_ms> <length of node> <node> <payload…>`.

use std::time::Duration;

use async_trait::async_trait;

use super::client::{Cmd, Pipeline, Value, cmd, from_server, items, unexpected_reply, word};
use super::value::STORED_MAX;
use super::{RedisStore, scripts};
use crate::facts::{ClaimId, LockName};
use crate::store::{
    Bind, BindingId, Bound, Change, Changed, Create, Expected, NewBinding, NodeSlot, Step, StoreError, StoreErrorKind,
};

/// How often a read and the command after it may disagree before the value counts as an empty text of another client.
/// Both are in one write, so another client's command rarely comes between them.
const LOOKS: usize = 3;

/// The reply to PTTL if there is no key.
const NO_KEY: i64 = -2;

#[async_trait]
impl Bind for RedisStore {
    async fn create(&self, new: &NewBinding) -> Result<Create, StoreError> {
        let key = self.keys.binding_key(new.id.kind, &new.id.id);
        let session = self.client.session().await?;
        if let Some(slot) = &new.slot {
            return self.create_with_slot(new, slot, &key).await;
        }
        // The read comes first: after the SET it would return the value that was just written.
        let mut create = Pipeline::with_capacity(2);
        create.add(read_command(&key));
        let mut set = Cmd::with_capacity("SET", new.value.len() + 256);
        set.arg(&key).arg(written(new)).arg(["NX", "PX"]).arg(new.keep.as_millis());
        create.add(set);
        for _ in 0..LOOKS {
            match &session.send_all(&create).await?.reply[..] {
                [_, Value::Simple(_)] => return Ok(Create::Created),
                [_, Value::Error(error)] | [Value::Error(error), _] => return Err(from_server(error)),
                // Another client created it between the two commands.
                [Value::Bulk(found), Value::Nil] if found.is_empty() => {}
                [Value::Bulk(found), Value::Nil] => return existing(found, &new.claim),
                _ => return Err(unexpected_reply("GETRANGE and SET NX")),
            }
        }
        Err(not_ours())
    }

    async fn read(&self, id: &BindingId) -> Result<Option<(Bound, Duration)>, StoreError> {
        let key = self.keys.binding_key(id.kind, &id.id);
        let session = self.client.session().await?;
        let mut look = Pipeline::with_capacity(2);
        look.add(read_command(&key));
        look.cmd("PTTL").arg(&key);
        for _ in 0..LOOKS {
            match &session.send_all(&look).await?.reply[..] {
                [Value::Error(error), _] | [_, Value::Error(error)] => return Err(from_server(error)),
                [Value::Bulk(value), Value::Int(NO_KEY)] if value.is_empty() => return Ok(None),
                // It was created between the two commands.
                [Value::Bulk(value), Value::Int(_)] if value.is_empty() => {}
                [Value::Bulk(value), Value::Int(left)] => {
                    let bound = bound(value)?;
                    // It expired between the two commands, or another client removed its expiry.
                    let left = u64::try_from(*left).map_or(Duration::ZERO, Duration::from_millis);
                    return Ok((!left.is_zero()).then_some((bound, left)));
                }
                _ => return Err(unexpected_reply("GETRANGE and PTTL")),
            }
        }
        Err(not_ours())
    }

    async fn change(&self, id: &BindingId, expected: &Expected, change: &Change) -> Result<Changed, StoreError> {
        let (claim, revision) = match expected {
            Expected::Any => ("", String::new()),
            Expected::Claim(claim) => (claim.as_str(), String::new()),
            Expected::Unchanged(claim, revision) => (claim.as_str(), revision.to_string()),
        };
        let keep = change.keep.map_or_else(String::new, |keep| keep.as_millis().to_string());
        let slot = if change.give_slot_back { "give back" } else { "keep" };
        self.rebind(id, &|cmd, node| {
            cmd.arg(claim).arg(&revision).arg(node).arg(&keep).arg(slot).arg(&change.value);
        })
        .await
    }

    async fn remove(&self, id: &BindingId, claim: &ClaimId) -> Result<Changed, StoreError> {
        self.rebind(id, &|cmd, node| {
            cmd.arg(claim.as_str()).arg("").arg(node).arg("").arg("remove");
        })
        .await
    }

    async fn advance(&self, step: &Step) -> Result<Changed, StoreError> {
        let what = if step.over { "over" } else { "running" };
        self.step(&step.id, &|cmd| {
            cmd.arg(step.claim.as_str()).arg(step.fence).arg(what).arg(step.keep.as_millis()).arg(&step.value);
        })
        .await
    }

    async fn withdraw(&self, id: &BindingId, claim: &ClaimId) -> Result<Changed, StoreError> {
        self.step(id, &|cmd| {
            cmd.arg(claim.as_str()).arg("0").arg("remove");
        })
        .await
    }
}

impl RedisStore {
    async fn create_with_slot(&self, new: &NewBinding, slot: &NodeSlot, key: &str) -> Result<Create, StoreError> {
        let session = self.client.session().await?;
        let (slots, value) = (self.keys.slots_key(&slot.node), written(new));
        let args = |cmd: &mut Cmd| {
            cmd.arg(&value).arg(new.claim.as_str()).arg(new.keep.as_millis()).arg(u64::from(slot.of));
        };
        let reply = items(session.run(&scripts::BIND, &[key, &slots], args).await?.reply, "bind")?;
        match (reply.first().and_then(word), reply.get(1)) {
            (Some("created"), _) => Ok(Create::Created),
            (Some("no slot"), _) => Ok(Create::NoSlot),
            (Some("exists"), Some(Value::Bulk(found))) => existing(found, &new.claim),
            (Some("too long"), _) => Err(too_long()),
            _ => Err(unexpected_reply("bind")),
        }
    }

    /// Runs the rebind script. The node whose slots change is known only from the value, so the script returns the node
    /// and is sent again with the key of its slots.
    async fn rebind(&self, id: &BindingId, args: &(dyn Fn(&mut Cmd, &str) + Sync)) -> Result<Changed, StoreError> {
        let key = self.keys.binding_key(id.kind, &id.id);
        let session = self.client.session().await?;
        let mut node: Option<LockName> = None;
        loop {
            let slots = node.as_ref().map(|node| self.keys.slots_key(node));
            let keys: Vec<&str> = [Some(key.as_str()), slots.as_deref()].into_iter().flatten().collect();
            let named = node.as_ref().map_or("", LockName::as_str);
            let reply = session.run(&scripts::REBIND, &keys, |cmd| args(cmd, named)).await?.reply;
            let reply = items(reply, "rebind")?;
            match (reply.first().and_then(word), reply.get(1)) {
                (Some("node"), Some(found)) => {
                    node = Some(word(found).and_then(|node| LockName::new(node).ok()).ok_or_else(not_ours)?);
                }
                _ => return changed(&reply, "rebind"),
            }
        }
    }

    async fn step(&self, id: &BindingId, args: &(dyn Fn(&mut Cmd) + Sync)) -> Result<Changed, StoreError> {
        let key = self.keys.binding_key(id.kind, &id.id);
        let session = self.client.session().await?;
        changed(&items(session.run(&scripts::ONCE, &[&key], args).await?.reply, "once")?, "once")
    }
}

/// Parses the reply of a script that compares before it writes.
fn changed(reply: &[Value], script: &'static str) -> Result<Changed, StoreError> {
    match (reply.first().and_then(word), reply.get(1)) {
        (Some("done"), _) => Ok(Changed::Done),
        (Some("gone"), _) => Ok(Changed::Gone),
        (Some("other"), Some(Value::Bulk(found))) => Ok(Changed::Other(bound(found)?)),
        (Some("too long"), _) => Err(too_long()),
        _ => Err(unexpected_reply(script)),
    }
}

/// The command that reads a binding, cut to one byte more than [`STORED_MAX`]. Without a key the reply is an empty
/// text.
fn read_command(key: &str) -> Cmd {
    let mut look = cmd("GETRANGE");
    look.arg(key).arg(0_u64).arg(STORED_MAX);
    look
}

/// The text that a creation writes.
fn written(new: &NewBinding) -> Vec<u8> {
    let node = new.slot.as_ref().map_or("", |slot| slot.node.as_str());
    let head = format!("lh1 {} 0 {} {} {node} ", new.claim, new.keep.as_millis(), node.len());
    [head.as_bytes(), &new.value].concat()
}

fn existing(found: &[u8], ours: &ClaimId) -> Result<Create, StoreError> {
    let bound = bound(found)?;
    Ok(if bound.claim == *ours { Create::Created } else { Create::Exists(bound) })
}

fn bound(found: &[u8]) -> Result<Bound, StoreError> {
    if found.len() > STORED_MAX {
        return Err(too_long());
    }
    parse(found).ok_or_else(not_ours)
}

fn parse(value: &[u8]) -> Option<Bound> {
    let mut rest = value.strip_prefix(b"lh1 ")?;
    let mut next = || {
        let end = rest.iter().position(|byte| *byte == b' ')?;
        let (field, after) = (std::str::from_utf8(&rest[..end]).ok()?, &rest[end + 1..]);
        rest = after;
        Some(field)
    };
    let claim = ClaimId::parse(next()?).ok()?;
    let revision = next()?.parse().ok()?;
    let keep = Duration::from_millis(next()?.parse().ok()?);
    let length: usize = next()?.parse().ok()?;
    let (node, after) = rest.split_at_checked(length)?;
    let node = match node {
        [] => None,
        node => Some(LockName::new(std::str::from_utf8(node).ok()?).ok()?),
    };
    let value = after.strip_prefix(b" ")?.to_vec();
    Some(Bound { claim, revision, keep, node, value })
}

fn not_ours() -> StoreError {
    StoreError::new(StoreErrorKind::WrongType, "the value at a binding's key is not a binding")
}

fn too_long() -> StoreError {
    let what = format!(
        "the value at a binding's key has more than {STORED_MAX} bytes and is not a binding; \
         delete the key, or use another id"
    );
    StoreError::new(StoreErrorKind::WrongType, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{BindingKind, Retention};
    use crate::store::VALUE_BYTES_MAX;

    fn new(node: Option<&str>, value: &[u8]) -> NewBinding {
        let name = |text: &str| LockName::new(text).expect("a name");
        NewBinding {
            id: BindingId { kind: BindingKind::Bindings, id: name("x") },
            claim: ClaimId::random(),
            keep: Retention::new(Duration::from_secs(3)).expect("long enough"),
            slot: node.map(|node| NodeSlot { node: name(node), of: 1 }),
            value: value.to_vec(),
        }
    }

    #[test]
    fn a_value_is_read_back_as_it_was_written() {
        for node in [None, Some("node-7"), Some("with a space, ünï"), Some("7 ")] {
            for value in [&b""[..], b"{}", b" lh1 \0\xff\n "] {
                let new = new(node, value);
                let read = parse(&written(&new)).expect("ours");
                assert_eq!((&read.claim, read.revision, &read.value[..]), (&new.claim, 0, value));
                assert_eq!(read.node.as_ref().map(LockName::as_str), node);
                assert_eq!(read.keep, Duration::from_secs(3));
            }
        }
    }

    #[test]
    fn the_longest_binding_is_read_and_a_longer_text_is_not() {
        let mut longest = new(Some(&"n".repeat(LockName::MAX_BYTES)), &vec![b'x'; VALUE_BYTES_MAX]);
        longest.keep = Retention::new(Retention::MAX).expect("allowed");
        let text = String::from_utf8(written(&longest)).expect("text").replacen(" 0 ", &format!(" {} ", u64::MAX), 1);
        assert!(bound(text.as_bytes()).is_ok_and(|read| read.revision == u64::MAX));
        let longer = format!("{text}{}", "x".repeat(1024));
        assert_eq!(bound(longer.as_bytes()).map_err(|error| error.kind()), Err(StoreErrorKind::WrongType));
    }

    #[test]
    fn what_is_not_ours_is_not_taken_for_it() {
        let whole = written(&new(Some("n"), b"v"));
        for end in 0..whole.len() - 1 {
            assert_eq!(parse(&whole[..end]), None, "{end}");
        }
        for other in ["", "lh2 x 0 1 0  v", "lh1 short 0 1 0  v", "{\"job_id\":1}"] {
            assert_eq!(parse(other.as_bytes()), None, "{other}");
        }
    }
}

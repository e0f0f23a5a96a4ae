//! Bindings on a server: a creation is one plain SET, all else that compares is a script.
//!
//! The value: `lh1 <claim> <revision> <keep_ms> <length of node> <node> <payload…>`.

use std::time::Duration;

use async_trait::async_trait;

use super::conn::{Answer, items, said};
use super::errors::{from_server, strange};
use super::resp::{Cmd, Pipeline, Value, cmd};
use super::{RedisStore, scripts};
use crate::facts::{ClaimId, LockName};
use crate::store::{
    Bind, BindingId, Bound, Change, Changed, Create, Expected, NewBinding, NodeSlot, StoreError, StoreErrorKind,
};

#[async_trait]
impl Bind for RedisStore {
    async fn create(&self, new: &NewBinding) -> Result<Create, StoreError> {
        let key = self.keys.binding_key(new.id.shelf, &new.id.id);
        let conn = self.link.conn().await?;
        if let Some(slot) = &new.slot {
            return self.create_with_slot(new, slot, &key).await;
        }
        let mut set = Cmd::with_capacity("SET", new.value.len() + 256);
        set.arg(&key).arg(written(new)).arg(["NX", "GET", "PX"]).arg(new.keep.as_millis());
        match conn.ask(&set).await?.reply {
            Value::Nil => Ok(Create::Created),
            Value::Bulk(found) => existing(&found, &new.claim),
            _ => Err(strange("SET NX GET")),
        }
    }

    async fn read(&self, id: &BindingId) -> Result<Option<(Bound, Duration)>, StoreError> {
        let key = self.keys.binding_key(id.shelf, &id.id);
        let conn = self.link.conn().await?;
        let mut look = Pipeline::with_capacity(2);
        look.add(get(&key));
        look.cmd("PTTL").arg(&key);
        let Answer { reply, .. } = conn.ask_all(&look).await?;
        match &reply[..] {
            [Value::Error(error), _] | [_, Value::Error(error)] => Err(from_server(error)),
            [Value::Nil, _] => Ok(None),
            [Value::Bulk(value), Value::Int(left)] => {
                let bound = parse(value).ok_or_else(not_ours)?;
                // Over since the first of the two was asked; one without an end is somebody else's doing.
                let left = u64::try_from(*left).map_or(Duration::ZERO, Duration::from_millis);
                Ok((!left.is_zero()).then_some((bound, left)))
            }
            _ => Err(strange("GET and PTTL")),
        }
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
}

impl RedisStore {
    async fn create_with_slot(&self, new: &NewBinding, slot: &NodeSlot, key: &str) -> Result<Create, StoreError> {
        let conn = self.link.conn().await?;
        let (slots, value) = (self.keys.slots_key(&slot.node), written(new));
        let args = |cmd: &mut Cmd| {
            cmd.arg(&value).arg(new.claim.as_str()).arg(new.keep.as_millis()).arg(u64::from(slot.of));
        };
        let reply = items(conn.run(&scripts::BIND, &[key, &slots], args).await?.reply, "bind")?;
        match (reply.first().and_then(said), reply.get(1)) {
            (Some("created"), _) => Ok(Create::Created),
            (Some("no slot"), _) => Ok(Create::NoSlot),
            (Some("exists"), Some(Value::Bulk(found))) => existing(found, &new.claim),
            _ => Err(strange("bind")),
        }
    }

    /// The node whose slots are concerned is known only from the value: the script says, and is sent again
    /// with that key.
    async fn rebind(&self, id: &BindingId, args: &(dyn Fn(&mut Cmd, &str) + Sync)) -> Result<Changed, StoreError> {
        let key = self.keys.binding_key(id.shelf, &id.id);
        let conn = self.link.conn().await?;
        let mut node: Option<LockName> = None;
        loop {
            let slots = node.as_ref().map(|node| self.keys.slots_key(node));
            let keys: Vec<&str> = [Some(key.as_str()), slots.as_deref()].into_iter().flatten().collect();
            let named = node.as_ref().map_or("", LockName::as_str);
            let reply = conn.run(&scripts::REBIND, &keys, |cmd| args(cmd, named)).await?.reply;
            let reply = items(reply, "rebind")?;
            return match (reply.first().and_then(said), reply.get(1)) {
                (Some("done"), _) => Ok(Changed::Done),
                (Some("gone"), _) => Ok(Changed::Gone),
                (Some("other"), Some(Value::Bulk(found))) => Ok(Changed::Other(parse(found).ok_or_else(not_ours)?)),
                (Some("node"), Some(found)) => {
                    node = Some(said(found).and_then(|node| LockName::new(node).ok()).ok_or_else(not_ours)?);
                    continue;
                }
                _ => Err(strange("rebind")),
            };
        }
    }
}

fn get(key: &str) -> Cmd {
    let mut get = cmd("GET");
    get.arg(key);
    get
}

/// What a creation writes.
fn written(new: &NewBinding) -> Vec<u8> {
    let node = new.slot.as_ref().map_or("", |slot| slot.node.as_str());
    let head = format!("lh1 {} 0 {} {} {node} ", new.claim, new.keep.as_millis(), node.len());
    [head.as_bytes(), &new.value].concat()
}

fn existing(found: &[u8], ours: &ClaimId) -> Result<Create, StoreError> {
    let bound = parse(found).ok_or_else(not_ours)?;
    Ok(if bound.claim == *ours { Create::Created } else { Create::Exists(bound) })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Keep, Shelf};

    fn new(node: Option<&str>, value: &[u8]) -> NewBinding {
        let name = |text: &str| LockName::new(text).expect("a name");
        NewBinding {
            id: BindingId { shelf: Shelf::Bindings, id: name("x") },
            claim: ClaimId::random(),
            keep: Keep::new(Duration::from_secs(3)).expect("long enough"),
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

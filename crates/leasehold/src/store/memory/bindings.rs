//! Bindings inside one process: the shortest definition of each operation.

use std::time::Duration;

use async_trait::async_trait;

use super::{MemoryStore, World, now_ms};
use crate::facts::ClaimId;
use crate::store::record::{self, RecordVerdict};
use crate::store::{Bind, BindingId, Bound, Change, Changed, Create, Expected, NewBinding, Step, StoreError};

/// A binding and when it expires.
pub(super) struct StoredBinding {
    bound: Bound,
    /// The key of the node's slots, if the binding has one.
    slots: Option<String>,
    ends_ms: u64,
}

impl World {
    /// Removes expired bindings. Returns the current time in milliseconds.
    fn expire_bindings(&mut self) -> u64 {
        let now = now_ms();
        self.bindings.retain(|_, stored| stored.ends_ms > now);
        now
    }
}

#[async_trait]
impl Bind for MemoryStore {
    async fn create(&self, new: &NewBinding) -> Result<Create, StoreError> {
        let key = self.keys.binding_key(new.id.kind, &new.id.id);
        let slots = new.slot.as_ref().map(|slot| (self.keys.slots_key(&slot.node), slot));
        let mut world = self.world.lock();
        let now = world.expire_bindings();
        if let Some(stored) = world.bindings.get(&key) {
            let ours = stored.bound.claim == new.claim;
            return Ok(if ours { Create::Created } else { Create::Exists(stored.bound.clone()) });
        }
        if let Some((slots, slot)) = &slots {
            let taken = world.bindings.values().filter(|stored| stored.slots.as_ref() == Some(slots)).count();
            if taken >= slot.of as usize {
                return Ok(Create::NoSlot);
            }
        }
        let bound = Bound {
            claim: new.claim.clone(),
            revision: 0,
            keep: new.keep.duration(),
            node: new.slot.as_ref().map(|slot| slot.node.clone()),
            value: new.value.clone(),
        };
        let stored = StoredBinding { bound, slots: slots.map(|(key, _)| key), ends_ms: now + new.keep.as_millis() };
        world.bindings.insert(key, stored);
        Ok(Create::Created)
    }

    async fn read(&self, id: &BindingId) -> Result<Option<(Bound, Duration)>, StoreError> {
        let mut world = self.world.lock();
        let now = world.expire_bindings();
        let found = world.bindings.get(&self.keys.binding_key(id.kind, &id.id));
        Ok(found.map(|stored| (stored.bound.clone(), Duration::from_millis(stored.ends_ms - now))))
    }

    async fn change(&self, id: &BindingId, expected: &Expected, change: &Change) -> Result<Changed, StoreError> {
        let mut world = self.world.lock();
        let now = world.expire_bindings();
        let found = world.bindings.get_mut(&self.keys.binding_key(id.kind, &id.id));
        let Some(StoredBinding { bound, slots, ends_ms }) = found else { return Ok(Changed::Gone) };
        if !expected.matches(&bound.claim, bound.revision) {
            return Ok(Changed::Other(bound.clone()));
        }
        bound.revision += 1;
        bound.value.clone_from(&change.value);
        if let Some(keep) = change.keep {
            bound.keep = keep.duration();
            *ends_ms = now + keep.as_millis();
        }
        if change.give_slot_back {
            (bound.node, *slots) = (None, None);
        }
        Ok(Changed::Done)
    }

    async fn remove(&self, id: &BindingId, claim: &ClaimId) -> Result<Changed, StoreError> {
        let mut world = self.world.lock();
        world.expire_bindings();
        let key = self.keys.binding_key(id.kind, &id.id);
        match world.bindings.get(&key) {
            None => Ok(Changed::Gone),
            Some(stored) if stored.bound.claim != *claim => Ok(Changed::Other(stored.bound.clone())),
            Some(_) => {
                world.bindings.remove(&key);
                Ok(Changed::Done)
            }
        }
    }

    async fn advance(&self, step: &Step) -> Result<Changed, StoreError> {
        let mut world = self.world.lock();
        let now = world.expire_bindings();
        let key = self.keys.binding_key(step.id.kind, &step.id.id);
        let found = world.bindings.get(&key).map(|stored| &stored.bound);
        let revision = match (record::judge(step, found), found) {
            (RecordVerdict::Write { revision }, _) => revision,
            (RecordVerdict::Refuse, Some(found)) => return Ok(Changed::Other(found.clone())),
            (RecordVerdict::Already | RecordVerdict::Refuse, _) => return Ok(Changed::Done),
        };
        let (claim, value) = (step.claim.clone(), step.value.clone());
        let bound = Bound { claim, revision, keep: step.keep.duration(), node: None, value };
        world.bindings.insert(key, StoredBinding { bound, slots: None, ends_ms: now + step.keep.as_millis() });
        Ok(Changed::Done)
    }

    async fn withdraw(&self, id: &BindingId, claim: &ClaimId) -> Result<Changed, StoreError> {
        let mut world = self.world.lock();
        world.expire_bindings();
        let key = self.keys.binding_key(id.kind, &id.id);
        match world.bindings.get(&key) {
            None => Ok(Changed::Gone),
            Some(stored) if !record::may_withdraw(claim, &stored.bound) => Ok(Changed::Other(stored.bound.clone())),
            Some(_) => {
                world.bindings.remove(&key);
                Ok(Changed::Done)
            }
        }
    }
}

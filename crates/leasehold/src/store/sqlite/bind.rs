//! The operations on bindings, as commands for the driver thread.

use std::time::Duration;

use async_trait::async_trait;

use super::SqliteStore;
use super::bindings::{Changing, Creating, How};
use super::serve::Command;
use crate::facts::ClaimId;
use crate::store::{Bind, BindingId, Bound, Change, Changed, Create, Expected, NewBinding, Step, StoreError};

#[async_trait]
impl Bind for SqliteStore {
    async fn create(&self, new: &NewBinding) -> Result<Create, StoreError> {
        let key = self.keys.binding_key(new.id.kind, &new.id.id);
        let slots = new.slot.as_ref().map(|slot| (self.keys.slots_key(&slot.node), slot.of));
        let creating = Creating { key, slots, new: new.clone() };
        self.ask(|reply| Command::Create(Box::new(creating), reply)).await
    }

    async fn read(&self, id: &BindingId) -> Result<Option<(Bound, Duration)>, StoreError> {
        let key = self.keys.binding_key(id.kind, &id.id);
        self.call(move |driver| driver.read_binding(&key)).await
    }

    async fn change(&self, id: &BindingId, expected: &Expected, change: &Change) -> Result<Changed, StoreError> {
        let key = self.keys.binding_key(id.kind, &id.id);
        self.write(key, How::Change(expected.clone(), change.clone())).await
    }

    async fn remove(&self, id: &BindingId, claim: &ClaimId) -> Result<Changed, StoreError> {
        self.write(self.keys.binding_key(id.kind, &id.id), How::Remove(claim.clone())).await
    }

    async fn advance(&self, step: &Step) -> Result<Changed, StoreError> {
        self.write(self.keys.binding_key(step.id.kind, &step.id.id), How::Advance(step.clone())).await
    }

    async fn withdraw(&self, id: &BindingId, claim: &ClaimId) -> Result<Changed, StoreError> {
        self.write(self.keys.binding_key(id.kind, &id.id), How::Withdraw(claim.clone())).await
    }
}

impl SqliteStore {
    async fn write(&self, key: String, how: How) -> Result<Changed, StoreError> {
        self.ask(|reply| Command::Change(Box::new(Changing { key, how }), reply)).await
    }
}

//! Events of the whole fleet, over a connection of their own. They end with it: whoever follows again knows
//! that some may be missing.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::address::Address;
use super::conn::open_another;
use super::errors::from_server;
use super::resp::{Value, cmd};
use super::wire::{Hear, Wire};
use super::{RedisOptions, RedisStore};
use crate::clock::Moment;
use crate::event::LockEvent;
use crate::store::{StoreError, StoreErrorKind};

/// Events kept for a follower that does not keep up.
const BACKLOG: usize = 1_024;

/// Passes events on to a follower.
struct Forward(mpsc::Sender<LockEvent>);

impl Hear for Forward {
    fn answered(&self, _: Moment) {}

    fn push(&self, push: &[Value]) -> Result<(), StoreError> {
        if let [Value::Bulk(kind), _, Value::Bulk(json)] = push
            && kind == b"message"
            // Anybody who may publish can publish anything; and events of a newer version are not ours to show.
            && let Some(event) = LockEvent::read(json)
        {
            self.0.try_send(event).map_err(|_| StoreError::new(StoreErrorKind::Closed, "nobody reads the events"))?;
        }
        Ok(())
    }
}

impl RedisStore {
    pub(super) async fn follow_events(&self) -> Result<mpsc::Receiver<LockEvent>, StoreError> {
        if self.link.is_forked() {
            return Err(StoreErrorKind::Forked.into());
        }
        if self.link.stop.is_cancelled() {
            return Err(StoreErrorKind::Closed.into());
        }
        let (tell, events) = mpsc::channel(BACKLOG);
        let wire = subscribe(&self.link.address, &self.link.options, &self.shared.events, &tell).await?;
        let stop = self.link.stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = tell.closed() => {}
                () = wire.broken() => {}
            }
        });
        Ok(events)
    }
}

async fn subscribe(
    address: &Address,
    options: &RedisOptions,
    channel: &str,
    tell: &mpsc::Sender<LockEvent>,
) -> Result<Wire, StoreError> {
    let wire = open_another(address, options, Arc::new(Forward(tell.clone()))).await?;
    match wire.ask_push(cmd("SUBSCRIBE").arg(channel), "subscribe", channel).reply().await? {
        Value::Error(error) => Err(from_server(&error)),
        _ => Ok(wire),
    }
}

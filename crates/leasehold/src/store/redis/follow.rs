//! A subscription to published events of the whole fleet, on its own connection. The stream ends with the connection,
//! so that a follower knows that it may have missed events.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::client::{Address, Connection, PushHandler, Value, cmd, from_server, open_connection};
use super::{RedisOptions, RedisStore};
use crate::clock::Moment;
use crate::events::lock_event::LockEvent;
use crate::store::{StoreError, StoreErrorKind};

/// Events buffered for a slow follower. When the buffer is full, the subscription ends.
const BACKLOG: usize = 1_024;

/// Forwards published events to a follower.
struct EventForwarder(mpsc::Sender<LockEvent>);

impl PushHandler for EventForwarder {
    fn answered(&self, _: Moment) {}

    fn push(&self, push: &[Value]) -> Result<(), StoreError> {
        if let [Value::Bulk(kind), _, Value::Bulk(json)] = push
            && kind == b"message"
            // Skips what other clients publish, and events of a newer version.
            && let Some(event) = LockEvent::read(json)
        {
            self.0
                .try_send(event)
                .map_err(|_| StoreError::new(StoreErrorKind::Closed, "the follower of the events is gone"))?;
        }
        Ok(())
    }
}

impl RedisStore {
    pub(super) async fn follow_events(&self) -> Result<mpsc::Receiver<LockEvent>, StoreError> {
        if self.client.is_forked() {
            return Err(StoreErrorKind::Forked.into());
        }
        if self.client.stop.is_cancelled() {
            return Err(StoreErrorKind::Closed.into());
        }
        let (sender, events) = mpsc::channel(BACKLOG);
        let connection = subscribe(&self.client.address, &self.client.options, &self.namespace.events, &sender).await?;
        let stop = self.client.stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = sender.closed() => {}
                () = connection.broken() => {}
            }
        });
        Ok(events)
    }
}

async fn subscribe(
    address: &Address,
    options: &RedisOptions,
    channel: &str,
    sender: &mpsc::Sender<LockEvent>,
) -> Result<Connection, StoreError> {
    let connection = open_connection(address, options, Arc::new(EventForwarder(sender.clone()))).await?;
    match connection.send_subscription(cmd("SUBSCRIBE").arg(channel), "subscribe", channel).reply().await? {
        Value::Error(error) => Err(from_server(&error)),
        _ => Ok(connection),
    }
}

//! Events of the whole fleet, over a connection of their own.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::sleep;

use super::address::Address;
use super::conn::open_another;
use super::errors::from_server;
use super::resp::{Value, cmd};
use super::wire::{Hear, Wire};
use super::{RedisOptions, RedisStore};
use crate::clock::Moment;
use crate::event::LockEvent;
use crate::store::{StoreError, StoreErrorKind};

/// Events kept for a follower that does not keep up; what comes beyond is missed.
const BACKLOG: usize = 1_024;
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Passes events on to a follower.
struct Forward(mpsc::Sender<LockEvent>);

impl Hear for Forward {
    fn answered(&self, _: Moment) {}

    fn push(&self, push: &[Value]) -> Result<(), StoreError> {
        if let [Value::Bulk(kind), _, Value::Bulk(json)] = push
            && kind == b"message"
            // Events of a newer version that we cannot read are not ours to show.
            && let Ok(event) = serde_json::from_slice(json)
        {
            // A follower that does not keep up misses events.
            let _ = self.0.try_send(event);
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
        let (address, options, channel) =
            (self.link.address.clone(), self.link.options.clone(), self.shared.events.clone());
        let (tell, events) = mpsc::channel(BACKLOG);
        let mut wire = subscribe(&address, &options, &channel, &tell).await?;
        let stop = self.link.stop.clone();
        let gone = tell.clone();
        let keep_up = async move {
            loop {
                wire.broken().await;
                let mut pause = PAUSE_MIN;
                wire = loop {
                    sleep(pause).await;
                    if let Ok(wire) = subscribe(&address, &options, &channel, &tell).await {
                        break wire;
                    }
                    pause = (pause * 2).min(PAUSE_MAX);
                };
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = gone.closed() => {}
                () = keep_up => {}
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
    match wire.ask_push(cmd("SUBSCRIBE").arg(channel), "subscribe").reply().await? {
        Value::Error(error) => Err(from_server(&error)),
        _ => Ok(wire),
    }
}

//! Events of the whole fleet, over a connection of their own.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, PushInfo, PushKind, Value};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::errors::from_redis;
use super::{RedisOptions, RedisStore};
use crate::event::LockEvent;
use crate::store::{StoreError, StoreErrorKind};

/// Events kept for a follower that does not keep up; what comes beyond is missed.
const BACKLOG: usize = 1_024;
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A subscription that stands until the connection breaks.
struct Subscription {
    _conn: MultiplexedConnection,
    pushes: mpsc::Receiver<PushInfo>,
}

impl RedisStore {
    pub(super) async fn follow_events(&self) -> Result<mpsc::Receiver<LockEvent>, StoreError> {
        if self.link.is_forked() {
            return Err(StoreErrorKind::Forked.into());
        }
        if self.link.stop.is_cancelled() {
            return Err(StoreErrorKind::Closed.into());
        }
        let (client, options, channel) =
            (self.link.client().clone(), self.link.options.clone(), self.shared.events.clone());
        let mut subscription = subscribe(&client, &options, &channel).await?;
        let (tell, events) = mpsc::channel(BACKLOG);
        let stop = self.link.stop.clone();
        let gone = tell.clone();
        let pump = async move {
            loop {
                forward(&mut subscription.pushes, &tell).await;
                let mut pause = PAUSE_MIN;
                subscription = loop {
                    match subscribe(&client, &options, &channel).await {
                        Ok(subscription) => break subscription,
                        Err(_) => sleep(pause).await,
                    }
                    pause = (pause * 2).min(PAUSE_MAX);
                };
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = gone.closed() => {}
                () = pump => {}
            }
        });
        Ok(events)
    }
}

async fn subscribe(client: &redis::Client, options: &RedisOptions, channel: &str) -> Result<Subscription, StoreError> {
    let (tell, pushes) = mpsc::channel(BACKLOG);
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(options.connect_timeout))
        .set_response_timeout(Some(options.response_timeout))
        .set_push_sender(move |info| {
            // Full: the follower misses it. The end of the connection shows by the sender's own end.
            let _ = tell.try_send(info);
            Ok::<(), redis::aio::SendError>(())
        });
    let mut conn = client.get_multiplexed_async_connection_with_config(&config).await.map_err(|e| from_redis(&e))?;
    conn.subscribe(channel).await.map_err(|e| from_redis(&e))?;
    Ok(Subscription { _conn: conn, pushes })
}

/// Until the connection breaks.
async fn forward(pushes: &mut mpsc::Receiver<PushInfo>, tell: &mpsc::Sender<LockEvent>) {
    while let Some(push) = pushes.recv().await {
        if push.kind == PushKind::Disconnection {
            return;
        }
        if push.kind == PushKind::Message
            && let Some(Value::BulkString(json)) = push.data.get(1)
            // Events of a newer version that we cannot read are not ours to show.
            && let Ok(event) = serde_json::from_slice(json)
        {
            // A follower that does not keep up misses events.
            let _ = tell.try_send(event);
        }
    }
}

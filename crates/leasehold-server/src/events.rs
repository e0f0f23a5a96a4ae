//! The lock events of the whole fleet as server-sent events. A client can resume the stream after a disconnect.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Sse;
use axum::response::sse::{Event, KeepAlive};
use futures_util::Stream;
use futures_util::stream::unfold;
use leasehold::events::{EventKind, LockEvent};
use serde::Deserialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{self, Receiver, Sender};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::App;
use crate::caller::Caller;
use crate::extract::QueryParams;
use crate::keys::KeyEntry;
use crate::problem::{Problem, ProblemBody};

/// Events kept for clients that resume.
const BACKLOG_LEN: usize = 4_096;
/// How many events a subscriber may lag behind before it misses some.
const MAX_LAG: usize = 1_024;
/// The interval of keep-alive comments, which show proxies and clients that the stream is open.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// How often a stream checks that its key has not been revoked.
const KEY_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The pause before the server subscribes to the store's events again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The event feed of this server.
pub(crate) struct Events {
    /// Distinguishes the event ids of this server from those of others.
    run: String,
    backlog: Mutex<Backlog>,
    live: Sender<Arc<FeedEntry>>,
}

#[derive(Default)]
struct Backlog {
    last: u64,
    entries: VecDeque<Arc<FeedEntry>>,
}

/// One event of the feed.
#[derive(Debug)]
struct FeedEntry {
    number: u64,
    payload: Payload,
}

#[derive(Debug)]
enum Payload {
    LockEvent(Box<LockEvent>),
    Alert(String),
    /// Some events may have been missed: clients must list the locks again.
    Gap,
}

/// Where to resume the stream.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ResumeParams {
    /// The `id` of the last event received, for clients that cannot send the header `Last-Event-ID`.
    last_id: Option<String>,
}

/// Stream lock events of the whole fleet
///
/// A stream of server-sent events: `granted` (once a lease is half a second old), `released`, `lost`, `revoked`,
/// `forced` and `asked_to_finish`, each with `kind`, `name`, `owner`, `holder_id`, `fence`, `at_ms` and `reason`; and
/// `alert`, with `state` (`firing` or `resolved`) and the fields of the alert. The stream resumes after the event named
/// by `Last-Event-ID`. An event `gap` means that some events before it may be missing. The stream ends when the server
/// stops or the key is revoked.
#[utoipa::path(get, path = "/api/v1/events", tag = "events", params(ResumeParams),
    responses((status = 200, description = "the stream", content_type = "text/event-stream", body = String), (status = 400, body = ProblemBody)))]
pub(crate) async fn stream(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    QueryParams(params): QueryParams<ResumeParams>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Problem> {
    let header = headers.get("last-event-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let (backlog, live) = app.events.subscribe_after(header.or(params.last_id).filter(|id| !id.is_empty()).as_deref());
    app.metrics.streams.inc();
    let subscriber = Subscriber { backlog, live, open: OpenStream(app), key: caller.key, check_key_at: Instant::now() };
    let stream = unfold(subscriber, async |mut subscriber| Some((Ok(subscriber.next().await?), subscriber)));
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE_INTERVAL)))
}

struct Subscriber {
    backlog: VecDeque<Arc<FeedEntry>>,
    live: Receiver<Arc<FeedEntry>>,
    open: OpenStream,
    /// The key of the subscriber, and when to check it again: a stream may stay open for weeks.
    key: Option<Arc<KeyEntry>>,
    check_key_at: Instant,
}

/// Counts a stream while it is open.
struct OpenStream(App);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.metrics.streams.dec();
    }
}

impl Subscriber {
    async fn next(&mut self) -> Option<Event> {
        let app = &self.open.0;
        if let Some(entry) = self.backlog.pop_front() {
            return Some(app.events.to_sse(&entry));
        }
        let entry = loop {
            tokio::select! {
                biased;
                () = app.stopping.cancelled() => return None,
                () = sleep_until(self.check_key_at), if self.key.is_some() => {
                    if is_revoked(app, self.key.as_deref()) {
                        return None;
                    }
                    self.check_key_at = Instant::now() + KEY_CHECK_INTERVAL;
                }
                entry = self.live.recv() => break entry,
            }
        };
        match entry {
            Ok(entry) => Some(app.events.to_sse(&entry)),
            Err(RecvError::Lagged(missed)) => {
                tracing::debug!(missed, "an event subscriber does not keep up");
                Some(Event::default().event("gap").data("{}"))
            }
            Err(RecvError::Closed) => None,
        }
    }
}

fn is_revoked(app: &App, key: Option<&KeyEntry>) -> bool {
    app.keys.as_ref().zip(key).is_some_and(|(keys, key)| !keys.knows(key))
}

impl Events {
    pub(crate) fn new() -> Self {
        let run = leasehold::lease::Token::random().holder_id().to_string();
        Self { run, backlog: Mutex::default(), live: broadcast::channel(MAX_LAG).0 }
    }

    /// Follows the store's events until the server stops. Events that happen after this function returns are
    /// published.
    pub(crate) async fn follow(app: App) -> JoinHandle<()> {
        let mut subscription = app.locks.events().await;
        let stopping = app.stopping.clone();
        let follow = async move {
            loop {
                match subscription {
                    Ok(mut events) => {
                        while let Some(event) = events.recv().await {
                            app.metrics.count_event(event.kind);
                            if event.kind == EventKind::Alert {
                                // Published once, when the board has it.
                                app.alerts.client_alert(&event);
                                continue;
                            }
                            app.snapshot.record_event(&event);
                            app.waiting_requests.notify(&event);
                            app.events.publish(Payload::LockEvent(Box::new(event)));
                        }
                    }
                    Err(error) => {
                        tracing::warn!(error = %format_args!("{error:#}"), "cannot subscribe to the store's events");
                        tokio::time::sleep(RETRY_INTERVAL).await;
                    }
                }
                app.snapshot.events_missed();
                subscription = app.locks.events().await;
                // Published only once the subscription works again: all events until then are missing.
                if subscription.is_ok() {
                    app.events.publish(Payload::Gap);
                }
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                () = stopping.cancelled() => {}
                () = follow => {}
            }
        })
    }

    /// Publishes an alert that fires or resolves.
    pub(crate) fn publish_alert(&self, json: String) {
        self.publish(Payload::Alert(json));
    }

    fn publish(&self, payload: Payload) {
        let mut backlog = self.backlog.lock().unwrap_or_else(PoisonError::into_inner);
        // Consecutive gaps are merged.
        let repeated_gap = matches!(
            (&payload, backlog.entries.back().map(|entry| &entry.payload)),
            (Payload::Gap, Some(Payload::Gap))
        );
        if repeated_gap {
            return;
        }
        backlog.last += 1;
        let entry = Arc::new(FeedEntry { number: backlog.last, payload });
        if backlog.entries.len() >= BACKLOG_LEN {
            backlog.entries.pop_front();
        }
        backlog.entries.push_back(entry.clone());
        // Sent inside the lock, so that a new subscriber neither misses an event nor receives one twice.
        let _ = self.live.send(entry);
    }

    /// Returns the events after `id` and a receiver of all later ones.
    fn subscribe_after(&self, id: Option<&str>) -> (VecDeque<Arc<FeedEntry>>, Receiver<Arc<FeedEntry>>) {
        let backlog = self.backlog.lock().unwrap_or_else(PoisonError::into_inner);
        let live = self.live.subscribe();
        let Some(id) = id else { return (VecDeque::new(), live) };
        let number = id.strip_prefix(&self.run).and_then(|rest| rest.strip_prefix('-')?.parse::<u64>().ok());
        let oldest = backlog.entries.front().map_or(backlog.last + 1, |entry| entry.number);
        let backlog = match number {
            Some(number) if number <= backlog.last && number + 1 >= oldest => {
                backlog.entries.iter().filter(|entry| entry.number > number).cloned().collect()
            }
            // The id is another server's or too old: return everything, after a gap.
            _ => {
                let gap = Arc::new(FeedEntry { number: oldest - 1, payload: Payload::Gap });
                std::iter::once(gap).chain(backlog.entries.iter().cloned()).collect()
            }
        };
        (backlog, live)
    }

    fn to_sse(&self, entry: &FeedEntry) -> Event {
        let event = Event::default().id(format!("{}-{}", self.run, entry.number));
        match &entry.payload {
            Payload::Gap => event.event("gap").data("{}"),
            Payload::Alert(json) => event.event("alert").data(json),
            Payload::LockEvent(lock_event) => {
                let kind = serde_json::to_value(lock_event.kind).ok();
                let kind = kind.as_ref().and_then(|kind| kind.as_str()).unwrap_or("other");
                event.event(kind).data(serde_json::to_string(lock_event).expect("an event is JSON"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(n: u64) -> Payload {
        Payload::LockEvent(Box::new(LockEvent {
            kind: EventKind::Released,
            name: format!("lock {n}"),
            owner: "o".into(),
            holder_id: "h".into(),
            fence: Some(n),
            at_ms: n,
            reason: "normal".into(),
        }))
    }

    fn numbers(backlog: &VecDeque<Arc<FeedEntry>>) -> Vec<(u64, bool)> {
        backlog.iter().map(|entry| (entry.number, matches!(entry.payload, Payload::Gap))).collect()
    }

    #[test]
    fn a_subscriber_resumes_or_receives_a_gap() {
        let events = Events::new();
        for n in 1..=3 {
            events.publish(event(n));
        }
        let id = |n: u64| format!("{}-{n}", events.run);
        assert!(events.subscribe_after(None).0.is_empty(), "from now on");
        assert_eq!(numbers(&events.subscribe_after(Some(&id(1))).0), [(2, false), (3, false)]);
        assert!(events.subscribe_after(Some(&id(3))).0.is_empty());
        let all = [(0, true), (1, false), (2, false), (3, false)];
        for unknown in ["nonsense", "7f3a91c2b04d-2", &id(4), &id(u64::MAX), ""] {
            assert_eq!(numbers(&events.subscribe_after(Some(unknown)).0), all, "{unknown}");
        }
        for n in 0..u64::try_from(BACKLOG_LEN).expect("small") {
            events.publish(event(n));
        }
        assert_eq!(numbers(&events.subscribe_after(Some(&id(2))).0)[0], (3, true), "too long ago");
        assert_eq!(events.subscribe_after(Some(&id(3))).0.len(), BACKLOG_LEN);
        events.publish(Payload::Gap);
        events.publish(Payload::Gap);
        assert_eq!(
            events.backlog.lock().expect("whole").last,
            u64::try_from(BACKLOG_LEN).expect("small") + 4,
            "one gap"
        );
    }
}

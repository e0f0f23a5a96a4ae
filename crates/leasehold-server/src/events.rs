//! What happens to the locks of the whole fleet, as it happens: server-sent events, which a client can
//! take up again where it lost them.

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
use leasehold::{EventKind, LockEvent};
use serde::Deserialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{self, Receiver, Sender};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::App;
use crate::alerts::Notice;
use crate::answer::{Problem, Said};
use crate::asked::Asked;
use crate::keys::{Caller, KeyEntry};

/// Events kept for those who come back.
const KEPT: usize = 4_096;
/// Events that a client may be behind before it misses some.
const BEHIND: usize = 1_024;
/// A line without meaning, so that proxies and clients see that the stream lives.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);
/// How often it is seen whether the key of whoever reads is still one.
const KEY_SEEN_EVERY: Duration = Duration::from_secs(1);
/// The pause before the store is asked again for its events.
const PAUSE: Duration = Duration::from_secs(1);

/// The events this server has seen.
pub(crate) struct Events {
    /// Sets the numbers of this server apart from another's.
    run: String,
    kept: Mutex<Kept>,
    live: Sender<Arc<Told>>,
}

#[derive(Default)]
struct Kept {
    last: u64,
    told: VecDeque<Arc<Told>>,
}

/// One line of the stream.
#[derive(Debug)]
struct Told {
    number: u64,
    what: What,
}

#[derive(Debug)]
enum What {
    Happened(Box<LockEvent>),
    Alert(Arc<Notice>),
    /// Some may have been missed here: look at the locks again.
    Gap,
}

/// Where to begin.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct From {
    /// The `id` of the last event that was seen, where the header `Last-Event-ID` cannot be sent.
    last_id: Option<String>,
}

/// What happens to all locks, as it happens
///
/// A stream of server-sent events: `granted` (once a lease has lasted half a second), `released`, `lost`, `revoked`,
/// `forced` and `asked_to_finish`, each with `kind`, `name`, `owner`, `holder_id`, `fence`, `at_ms` and `reason`; and `alert`, with `state` (`firing` or
/// `resolved`) and the fields of the alert. It goes on after the event named by `Last-Event-ID`; an event `gap` says that
/// some may be missing before it. Ends when the server does, or the key is revoked.
#[utoipa::path(get, path = "/api/v1/events", tag = "events", params(From),
    responses((status = 200, description = "the stream", content_type = "text/event-stream", body = String), (status = 400, body = Said)))]
pub(crate) async fn stream(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    Asked(from): Asked<From>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Problem> {
    let header = headers.get("last-event-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let (backlog, live) = app.events.after(header.or(from.last_id).filter(|id| !id.is_empty()).as_deref());
    app.metrics.streams.inc();
    let reader = Reader { backlog, live, open: Open(app), key: caller.key, look_at_key: Instant::now() };
    let stream = unfold(reader, async |mut reader| Some((Ok(reader.next().await?), reader)));
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(SIGN_OF_LIFE)))
}

struct Reader {
    backlog: VecDeque<Arc<Told>>,
    live: Receiver<Arc<Told>>,
    open: Open,
    /// Whose stream it is, and when that is looked at again: a stream may be open for weeks.
    key: Option<Arc<KeyEntry>>,
    look_at_key: Instant,
}

/// Counts a stream for as long as it is open.
struct Open(App);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.metrics.streams.dec();
    }
}

impl Reader {
    async fn next(&mut self) -> Option<Event> {
        let app = &self.open.0;
        if let Some(told) = self.backlog.pop_front() {
            return Some(app.events.shown(&told));
        }
        let told = loop {
            tokio::select! {
                biased;
                () = app.stopping.cancelled() => return None,
                () = sleep_until(self.look_at_key), if self.key.is_some() => {
                    if is_revoked(app, self.key.as_deref()) {
                        return None;
                    }
                    self.look_at_key = Instant::now() + KEY_SEEN_EVERY;
                }
                told = self.live.recv() => break told,
            }
        };
        match told {
            Ok(told) => Some(app.events.shown(&told)),
            Err(RecvError::Lagged(missed)) => {
                tracing::debug!(missed, "a reader of the events does not keep up");
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
        let run = leasehold::Token::random().holder_id().to_string();
        Self { run, kept: Mutex::default(), live: broadcast::channel(BEHIND).0 }
    }

    /// Follows the store until the server stops. When this returns it has begun: what happens from then on is
    /// told.
    pub(crate) async fn follow(app: App) -> JoinHandle<()> {
        let mut followed = app.locks.events().await;
        let stopping = app.stopping.clone();
        let follow = async move {
            loop {
                match followed {
                    Ok(mut happening) => {
                        while let Some(event) = happening.recv().await {
                            app.metrics.happened(event.kind);
                            if event.kind == EventKind::Alert {
                                // Told when it is on the board, and once.
                                app.alerts.told_by_a_client(&event);
                                continue;
                            }
                            app.picture.happened(&event);
                            app.repeated.happened(&event);
                            app.events.tell(What::Happened(Box::new(event)));
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, "the events cannot be followed");
                        tokio::time::sleep(PAUSE).await;
                    }
                }
                app.picture.missed();
                followed = app.locks.events().await;
                // Told once the store is followed again: what happened until then is missing.
                if followed.is_ok() {
                    app.events.tell(What::Gap);
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

    /// An alert begins or is over.
    pub(crate) fn alert(&self, notice: Arc<Notice>) {
        self.tell(What::Alert(notice));
    }

    fn tell(&self, what: What) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // One gap is as good as many.
        let again = matches!((&what, kept.told.back().map(|told| &told.what)), (What::Gap, Some(What::Gap)));
        if again {
            return;
        }
        kept.last += 1;
        let told = Arc::new(Told { number: kept.last, what });
        if kept.told.len() >= KEPT {
            kept.told.pop_front();
        }
        kept.told.push_back(told.clone());
        // Inside the lock, so that whoever begins to read misses none and gets none twice.
        let _ = self.live.send(told);
    }

    /// What came after an event, and what comes.
    fn after(&self, id: Option<&str>) -> (VecDeque<Arc<Told>>, Receiver<Arc<Told>>) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let live = self.live.subscribe();
        let Some(id) = id else { return (VecDeque::new(), live) };
        let number = id.strip_prefix(&self.run).and_then(|rest| rest.strip_prefix('-')?.parse::<u64>().ok());
        let oldest = kept.told.front().map_or(kept.last + 1, |told| told.number);
        let backlog = match number {
            Some(number) if number <= kept.last && number + 1 >= oldest => {
                kept.told.iter().filter(|told| told.number > number).cloned().collect()
            }
            // Of another server, or too long ago: all there is, after a gap.
            _ => {
                let gap = Arc::new(Told { number: oldest - 1, what: What::Gap });
                std::iter::once(gap).chain(kept.told.iter().cloned()).collect()
            }
        };
        (backlog, live)
    }

    fn shown(&self, told: &Told) -> Event {
        let event = Event::default().id(format!("{}-{}", self.run, told.number));
        match &told.what {
            What::Gap => event.event("gap").data("{}"),
            What::Alert(notice) => {
                event.event("alert").data(serde_json::to_string(&**notice).expect("a notice is JSON"))
            }
            What::Happened(happened) => {
                let kind = serde_json::to_value(happened.kind).ok();
                let kind = kind.as_ref().and_then(|kind| kind.as_str()).unwrap_or("other");
                event.event(kind).data(serde_json::to_string(happened).expect("an event is JSON"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn happened(n: u64) -> What {
        What::Happened(Box::new(LockEvent {
            kind: EventKind::Released,
            name: format!("lock {n}"),
            owner: "o".into(),
            holder_id: "h".into(),
            fence: Some(n),
            at_ms: n,
            reason: "normal".into(),
        }))
    }

    fn numbers(backlog: &VecDeque<Arc<Told>>) -> Vec<(u64, bool)> {
        backlog.iter().map(|told| (told.number, matches!(told.what, What::Gap))).collect()
    }

    #[test]
    fn a_reader_goes_on_where_it_was_or_is_told_of_a_gap() {
        let events = Events::new();
        for n in 1..=3 {
            events.tell(happened(n));
        }
        let id = |n: u64| format!("{}-{n}", events.run);
        assert!(events.after(None).0.is_empty(), "from now on");
        assert_eq!(numbers(&events.after(Some(&id(1))).0), [(2, false), (3, false)]);
        assert!(events.after(Some(&id(3))).0.is_empty());
        let all = [(0, true), (1, false), (2, false), (3, false)];
        for unknown in ["nonsense", "7f3a91c2b04d-2", &id(4), &id(u64::MAX), ""] {
            assert_eq!(numbers(&events.after(Some(unknown)).0), all, "{unknown}");
        }
        for n in 0..u64::try_from(KEPT).expect("small") {
            events.tell(happened(n));
        }
        assert_eq!(numbers(&events.after(Some(&id(2))).0)[0], (3, true), "too long ago");
        assert_eq!(events.after(Some(&id(3))).0.len(), KEPT);
        events.tell(What::Gap);
        events.tell(What::Gap);
        assert_eq!(events.kept.lock().expect("whole").last, u64::try_from(KEPT).expect("small") + 4, "one gap");
    }
}

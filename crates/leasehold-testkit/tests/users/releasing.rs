//! The layers of a release (script, retries, fallbacks, journal) against a server with real failures. No layer changes a lock of
//! another holder.

use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use leasehold::events::{Observer, ReleaseLayer, Transition};
use leasehold::inspect::{EvictMode, JournalKind};
use leasehold::store::StoreErrorKind;
use leasehold::{Error, Fence, LockManager, LossReason, OnUnavailable, Options};
use leasehold_testkit::{Arena, FaultProxy, Kind};
use tokio::time::timeout;

const LONG: Duration = Duration::from_secs(20);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Records alerts and the layers of releases.
#[derive(Default)]
struct Seen {
    alerts: Mutex<Vec<(String, String, String)>>,
    layers: Mutex<Vec<ReleaseLayer>>,
}

impl Observer for Seen {
    fn observe(&self, transition: &Transition<'_>) {
        match transition {
            Transition::Alert { kind, name, owner, .. } => {
                let alert = ((*kind).to_owned(), (*name).to_owned(), (*owner).to_owned());
                self.alerts.lock().expect("no panic before").push(alert);
            }
            Transition::Released { layer, .. } => self.layers.lock().expect("no panic before").push(*layer),
            _ => {}
        }
    }
}

/// Options with short delays, so that a test reaches all layers.
fn options(arena: &Arena, seen: &Arc<Seen>) -> Options {
    let mut options = arena.options();
    options.max_release_retries = 1;
    options.emergency_release_delay = ms(50);
    options.request_timeout = ms(500);
    options.observer = Some(seen.clone());
    options
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !holds().await {
            tokio::time::sleep(ms(5)).await;
        }
    };
    timeout(LONG, waiting).await.unwrap_or_else(|_| panic!("never came: {what}"));
}

/// Creates a user with all permissions except to run scripts.
async fn forbid_scripts(arena: &Arena) {
    let rule = ["ACL", "SETUSER", "default", "-eval", "-evalsha", "-script"];
    assert_eq!(arena.server().command(&rule).await, redis::Value::Okay);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_script_is_counted_alerted_and_survived() {
    let (arena, seen) = (Arena::new(Kind::Redis).await, Arc::new(Seen::default()));
    let manager = arena.manager_with(options(&arena, &seen)).await;
    let guard = manager.lock("gpu_lock:0").owner("tts").await.expect("free");
    forbid_scripts(&arena).await;
    let Err(Error::Store { source, .. }) = guard.release().await else { panic!("the script cannot run") };
    assert_eq!(source.kind(), StoreErrorKind::NotPermitted);
    until("the emergency release", async || manager.statistics().emergency_releases == 1).await;
    assert_eq!(arena.server().command(&["EXISTS", "gpu_lock:0"]).await, redis::Value::Int(0));
    let statistics = manager.statistics();
    assert_eq!((statistics.normal_release_failures, statistics.release_script_errors), (1, 1));
    assert!((statistics.emergency_release_rate() - 1.0).abs() < 1e-9);
    assert!((statistics.exception_rate() - 1.0).abs() < 1e-9);
    until("both alerts", async || seen.alerts.lock().expect("no panic before").len() == 2).await;
    let alerts = seen.alerts.lock().expect("no panic before").clone();
    let kinds: Vec<&str> = alerts.iter().map(|(kind, ..)| kind.as_str()).collect();
    assert_eq!(kinds, ["lua_script_error", "gpu_lock_emergency_release"]);
    assert!(alerts.iter().all(|(_, name, owner)| name == "gpu_lock:0" && owner.starts_with("tts@")), "{alerts:?}");
    assert_eq!(*seen.layers.lock().expect("no panic before"), [ReleaseLayer::Emergency]);
    assert!(manager.journal().expect("kept").entries().expect("readable").is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_emergency_release_never_touches_a_successor() {
    let (arena, seen) = (Arena::new(Kind::Redis).await, Arc::new(Seen::default()));
    let (a, b) = (arena.manager_with(options(&arena, &seen)).await, arena.manager().await);
    let late = a.lock("gpu_lock:0").renew(false).await.expect("free");
    arena.expire("gpu_lock:0").await;
    let successor = b.lock("gpu_lock:0").renew(false).wait_up_to(LONG).await.expect("expired");
    forbid_scripts(&arena).await;
    assert!(late.release().await.is_err());
    until("the emergency release", async || !seen.layers.lock().expect("no panic before").is_empty()).await;
    assert_eq!(a.statistics().emergency_releases, 0, "nothing was released");
    let holder = b.holder("gpu_lock:0").await.expect("answered").expect("still held");
    assert_eq!(holder.id, successor.holder_id());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_is_tried_again_when_the_connection_breaks() {
    let (arena, seen) = (Arena::new(Kind::Redis).await, Arc::new(Seen::default()));
    let proxy = FaultProxy::in_front_of(arena.server());
    let manager = LockManager::connect_with(&proxy.url(), options(&arena, &seen)).await.expect("a manager");
    let guard = manager.lock("cut").await.expect("free");
    let cut = proxy.cut_before_forwarding(leasehold_testkit::proxy::on("EVALSHA"), 1);
    drop(guard);
    cut.wait_for_hits(1).await;
    until("the retry", async || seen.layers.lock().expect("no panic before").len() == 1).await;
    assert_eq!(*seen.layers.lock().expect("no panic before"), [ReleaseLayer::Retried]);
    assert_eq!(manager.statistics().ownership_violations, 0);
    assert!(!manager.is_locked("cut").await.expect("answered"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unanswered_release_that_worked_is_no_violation() {
    let (arena, seen) = (Arena::new(Kind::Redis).await, Arc::new(Seen::default()));
    let proxy = FaultProxy::in_front_of(arena.server());
    let manager = LockManager::connect_with(&proxy.url(), options(&arena, &seen)).await.expect("a manager");
    let guard = manager.lock("cut").await.expect("free");
    let cut = proxy.cut_after_forwarding(leasehold_testkit::proxy::on("EVALSHA"), 1);
    assert!(guard.release().await.is_err(), "no answer is not an answer");
    cut.wait_for_hits(1).await;
    until("the retry", async || seen.layers.lock().expect("no panic before").len() == 1).await;
    assert_eq!(manager.statistics().ownership_violations, 0, "released before: not somebody else's");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_released_is_journalled_and_replayed_when_the_store_is_back() {
    let (arena, seen) = (Arena::new(Kind::Redis).await, Arc::new(Seen::default()));
    let proxy = FaultProxy::in_front_of(arena.server());
    let manager = LockManager::connect_with(&proxy.url(), options(&arena, &seen)).await.expect("a manager");
    let guard = manager.lock("gpu_lock:0").owner("tts").ttl(Duration::from_secs(600)).await.expect("free");
    let (id, token) = (guard.holder_id(), guard.token().clone());
    // Another client that is still connected.
    let follower = arena.manager().await;
    let mut events = follower.events().await.expect("answered");
    proxy.refuse(true);
    proxy.reset_all();
    drop(guard);
    let journal = manager.journal().expect("kept").clone();
    until("the entry", async || !journal.entries().expect("readable").is_empty()).await;
    let entries = journal.entries().expect("readable");
    assert_eq!((entries.len(), entries[0].kind), (1, JournalKind::Unreleased));
    assert_eq!((entries[0].name.as_str(), entries[0].holder_id.as_str()), ("gpu_lock:0", id.as_str()));
    assert!(entries[0].owner.starts_with("tts@") && !entries[0].why.is_empty());
    assert_eq!(manager.statistics().journalled_releases, 1);
    assert!(!format!("{entries:?}").contains(token.reveal()), "no secret in what people see");
    assert_eq!(*seen.layers.lock().expect("no panic before"), [ReleaseLayer::Journalled]);
    assert_eq!(arena.server().command(&["EXISTS", "gpu_lock:0"]).await, redis::Value::Int(1));
    proxy.refuse(false);
    until("the replay", async || journal.entries().expect("readable").is_empty()).await;
    assert_eq!(arena.server().command(&["EXISTS", "gpu_lock:0"]).await, redis::Value::Int(0));
    let told = async {
        loop {
            let event = events.recv().await.expect("followed");
            if let Some(("release_journalled", detail)) = event.alert() {
                assert!(!detail.is_empty() && event.owner.starts_with("tts@"), "{event:?}");
                return (event.name.clone(), event.holder_id.clone());
            }
        }
    };
    let told = timeout(LONG, told).await.expect("an alert waits for the store");
    assert_eq!(told, ("gpu_lock:0".to_owned(), id.to_string()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_outlives_its_process_and_can_be_settled_by_hand() {
    let (arena, seen) = (Arena::new(Kind::Redis).await, Arc::new(Seen::default()));
    let proxy = FaultProxy::in_front_of(arena.server());
    let manager = LockManager::connect_with(&proxy.url(), options(&arena, &seen)).await.expect("a manager");
    let guard = manager.lock("one").ttl(Duration::from_secs(600)).await.expect("free");
    proxy.refuse(true);
    proxy.reset_all();
    drop(guard);
    let journal = manager.journal().expect("kept").clone();
    until("the entry", async || journal.entries().expect("readable").len() == 1).await;
    // Settled by hand, before the store is back and the journal is replayed; through another handle, like another process.
    let elsewhere = leasehold::inspect::Journal::new(journal.dir());
    let entry = elsewhere.entries().expect("readable").remove(0);
    assert!(elsewhere.settle(&entry.id).expect("settled"));
    proxy.refuse(false);
    until("the connection", async || manager.is_locked("one").await.is_ok()).await;
    assert!(manager.is_locked("one").await.expect("answered"), "settled, not released");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_down_is_an_error_or_unprotected_work_but_never_silent() {
    let (arena, seen) = (Arena::new(Kind::Redis).await, Arc::new(Seen::default()));
    let closed = arena.manager_with(options(&arena, &seen)).await;
    let mut open = options(&arena, &seen);
    open.on_unavailable = OnUnavailable::FailOpen;
    let open = arena.manager_with(open).await;
    arena.server().kill9();
    let Err(Error::Store { source, store, .. }) = closed.lock("down").no_wait().await else { panic!("it is down") };
    assert!(source.may_have_happened() && store.starts_with("redis://127.0.0.1:"), "{source} {store}");
    let guard = open.lock("down").no_wait().await.expect("the work may run");
    assert!(!guard.is_protected() && guard.try_fence().is_none() && guard.fence() == Fence::NONE);
    assert_eq!(open.statistics().unprotected_runs, 1);
    let entries = open.journal().expect("kept").entries().expect("readable");
    assert_eq!(entries.iter().map(|e| e.kind).collect::<Vec<_>>(), [JournalKind::Unprotected]);
    assert!(guard.release().await.expect("nothing to give back"));
}

/// Remembers the threads on which losses were observed.
#[derive(Default)]
struct LossThreads(Mutex<Vec<ThreadId>>);

impl Observer for LossThreads {
    fn observe(&self, transition: &Transition<'_>) {
        if matches!(transition, Transition::Lost { .. }) {
            self.0.lock().expect("no panic before").push(thread::current().id());
        }
    }
}

#[tokio::test]
async fn an_observer_is_not_called_on_a_thread_of_the_store() {
    let (arena, seen) = (Arena::new(Kind::Sqlite).await, Arc::new(LossThreads::default()));
    let mut options = arena.options();
    options.observer = Some(seen.clone());
    let (a, b) = (arena.manager_with(options).await, arena.manager().await);
    let guard = a.lock("revoked").await.expect("free");
    b.evict("revoked", guard.holder_id(), EvictMode::Revoke, "a test").await.expect("answered");
    assert_eq!(timeout(LONG, guard.lost()).await, Ok(LossReason::Revoked));
    until("the observer", async || !seen.0.lock().expect("no panic before").is_empty()).await;
    assert_eq!(*seen.0.lock().expect("no panic before"), [thread::current().id()]);
}

//! Elections on every store, and with processes that are killed and stopped.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use leasehold::inspect::{EvictMode, Evicted};
use leasehold::{Error, LockManager, OnUnavailable};
use leasehold_testkit::history::{Event, EventKind, HistoryWriter};
use leasehold_testkit::{Arena, History, Kind, WorkerProcess, on_every_store};
use serde_json::json;
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(
    one_leads_at_a_time_and_the_others_know_who,
    a_lost_lead_cancels_the_work_and_is_stood_for_again,
    work_that_fails_leaves_the_lead_to_others,
    work_that_fails_at_once_does_not_spin,
    a_shutdown_ends_the_campaign,
    a_dropped_campaign_ends_the_term,
    a_panic_ends_the_term,
    bad_input_is_an_error_at_once,
);

async fn one_leads_at_a_time_and_the_others_know_who(arena: Arena) {
    let leading = Arc::new(AtomicUsize::new(0));
    let mut candidates = Vec::new();
    for i in 0..4 {
        let (manager, leading) = (arena.manager().await, leading.clone());
        candidates.push(tokio::spawn(async move {
            let me = format!("node-{i}");
            let other = manager.clone();
            let led = manager.elect("scheduler").owner(&me).run(async |term| {
                assert_eq!(leading.fetch_add(1, SeqCst), 0, "two leaders at once");
                let leader = other.elect("scheduler").leader().await?.expect("somebody leads");
                assert_eq!((leader.owner.task(), leader.id), (me.as_str(), term.holder_id()));
                assert_eq!(leasehold::current_fence(), Some(term.fence()), "at hand for whatever is called");
                tokio::time::sleep(ms(10)).await;
                leading.fetch_sub(1, SeqCst);
                Ok::<_, Error>(term.fence())
            });
            led.await.expect("led")
        }));
    }
    let mut fences = Vec::new();
    for candidate in candidates {
        fences.push(timeout(LONG, candidate).await.expect("in time").expect("no panic"));
    }
    fences.sort();
    fences.dedup();
    assert_eq!(fences.len(), 4, "everybody led a term of its own");
    assert!(arena.manager().await.elect("scheduler").leader().await.expect("answered").is_none(), "nobody leads");
}

async fn a_lost_lead_cancels_the_work_and_is_stood_for_again(arena: Arena) {
    let (manager, operator) = (arena.manager().await, arena.manager().await);
    let (told, mut terms) = unbounded_channel();
    let (cancelled, mut cancellations) = unbounded_channel();
    let campaign = tokio::spawn(async move {
        let term = async |term: leasehold::elect::Term| {
            let _ = told.send((term.holder_id(), term.fence()));
            let _tells = TellsWhenDropped(cancelled.clone());
            std::future::pending::<Result<(), Error>>().await
        };
        manager.elect("scheduler").run(term).await
    });
    let (first, first_fence) = timeout(LONG, terms.recv()).await.expect("in time").expect("elected");
    let evicted = operator.evict("scheduler", first, EvictMode::Revoke, "maintenance").await.expect("answered");
    assert!(matches!(evicted, Evicted::Done(_)), "{evicted:?}");
    timeout(LONG, cancellations.recv()).await.expect("in time").expect("the work was cancelled");
    let (second, second_fence) = timeout(LONG, terms.recv()).await.expect("in time").expect("elected again");
    assert!(second != first && second_fence > first_fence);
    campaign.abort();
}

struct TellsWhenDropped(tokio::sync::mpsc::UnboundedSender<()>);

impl Drop for TellsWhenDropped {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

async fn work_that_fails_leaves_the_lead_to_others(arena: Arena) {
    let (failing, healthy) = (arena.manager().await, arena.manager().await);
    let (told, mut terms) = unbounded_channel();
    let looker = failing.clone();
    let second = told.clone();
    let campaign = tokio::spawn(async move {
        let term = async |_: leasehold::elect::Term| {
            let _ = told.send("failing");
            // The other candidate waits by then.
            while looker.info("scheduler").await?.waiters.is_empty() {
                tokio::time::sleep(ms(1)).await;
            }
            Err::<(), _>(Error::from(leasehold::LockName::new("").expect_err("no name")))
        };
        failing.elect("scheduler").run(term).await
    });
    assert_eq!(timeout(LONG, terms.recv()).await.expect("in time"), Some("failing"));
    let led = healthy.elect("scheduler").run(async |_| {
        let _ = second.send("healthy");
        Ok::<_, Error>(())
    });
    timeout(LONG, led).await.expect("in time").expect("led");
    assert_eq!(timeout(LONG, terms.recv()).await.expect("in time"), Some("healthy"));
    assert_eq!(timeout(LONG, terms.recv()).await.expect("in time"), Some("failing"), "and stands again");
    campaign.abort();
}

async fn work_that_fails_at_once_does_not_spin(arena: Arena) {
    let manager = arena.manager().await;
    let terms = AtomicUsize::new(0);
    let campaign = manager.elect("scheduler").run(async |_| {
        terms.fetch_add(1, SeqCst);
        Err::<(), _>("cannot even begin")
    });
    timeout(ms(1_500), campaign).await.expect_err("it never gives up");
    // Pauses of 0.1, 0.2, 0.4 and 0.8 s: the fifth term would begin at 1.5 s.
    let terms = terms.load(SeqCst);
    assert!((2..=5).contains(&terms), "{terms} terms");
}

async fn a_shutdown_ends_the_campaign(arena: Arena) {
    let manager = arena.manager().await;
    let (told, mut terms) = unbounded_channel();
    let leader = manager.clone();
    let campaign = tokio::spawn(async move {
        let term = async |_: leasehold::elect::Term| {
            let _ = told.send(());
            std::future::pending::<Result<(), Error>>().await
        };
        leader.elect("scheduler").run(term).await
    });
    timeout(LONG, terms.recv()).await.expect("in time").expect("elected");
    timeout(LONG, manager.shutdown()).await.expect("in time");
    let end = timeout(LONG, campaign).await.expect("in time").expect("no panic");
    assert!(matches!(end, Err(Error::ShutDown { .. })), "{end:?}");
    assert!(!arena.manager().await.is_locked("scheduler").await.expect("answered"));
}

async fn a_dropped_campaign_ends_the_term(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let (told, mut terms) = unbounded_channel();
    let campaign = a.elect("scheduler").run(async |_| {
        let _ = told.send(());
        std::future::pending::<Result<(), Error>>().await
    });
    tokio::select! {
        _ = campaign => panic!("it does not end by itself"),
        elected = terms.recv() => elected.expect("elected"),
    }
    let led = b.elect("scheduler").run(async |_| Ok::<_, Error>(()));
    timeout(LONG, led).await.expect("in time").expect("led");
}

async fn a_panic_ends_the_term(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let panicking =
        tokio::spawn(
            async move { a.elect("scheduler").run(async |_| -> Result<(), Error> { panic!("on purpose") }).await },
        );
    assert!(panicking.await.expect_err("it panics").is_panic());
    let led = b.elect("scheduler").run(async |_| Ok::<_, Error>(()));
    timeout(LONG, led).await.expect("in time").expect("led");
}

async fn bad_input_is_an_error_at_once(arena: Arena) {
    let manager = arena.manager().await;
    let never = async |_: leasehold::elect::Term| -> Result<(), Error> { panic!("nobody was elected") };
    assert!(matches!(manager.elect("").run(never).await, Err(Error::Invalid(_))));
    assert!(matches!(manager.elect("").leader().await, Err(Error::Invalid(_))));
    assert!(matches!(manager.elect("a").ttl(ms(1)).run(never).await, Err(Error::Invalid(_))));
    assert!(matches!(manager.elect("a").owner("\n").run(never).await, Err(Error::Invalid(_))));
}

/// Without a server candidates wait and there is no leader, whatever the manager's options are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn there_is_no_leader_while_the_store_is_unreachable() {
    let server = leasehold_testkit::RedisServer::start().await;
    let mut options = leasehold::Options::default();
    (options.on_unavailable, options.outage_timeout, options.journal) = (OnUnavailable::FailOpen, ms(300), None);
    let manager = LockManager::connect_with(&server.url(), options).await.expect("a manager");
    server.kill9();
    assert!(!manager.lock("plain").await.expect("open").is_protected(), "plain locks fail open here");
    let campaign = manager.elect("scheduler").run(async |term| Ok::<_, Error>(term.is_valid()));
    tokio::pin!(campaign);
    let nobody = timeout(ms(1_500), &mut campaign).await;
    assert!(nobody.is_err(), "led without a store: {nobody:?}");
    server.restart().await;
    assert!(timeout(LONG, campaign).await.expect("in time").expect("led"), "protected");
}

const ELECTOR: &str = env!("CARGO_BIN_EXE_elector");

fn candidate(url: &str, history: &Path) -> WorkerProcess {
    WorkerProcess::spawn(ELECTOR, &json!({ "url": url, "name": "scheduler", "ttl_ms": 1_500, "history": history }))
}

async fn leads(candidate: &mut WorkerProcess) -> u64 {
    let line = candidate.wait_for_line(|line| line["leading"].is_u64(), LONG).await.expect("leads in time");
    line["leading"].as_u64().expect("a fence")
}

async fn killed_and_stopped_leaders(kind: Kind) {
    let arena = Arena::new(kind).await;
    let url = arena.url().expect("a store that processes can share");
    let dir = tempfile::tempdir().expect("a directory");
    let looker = arena.manager().await;
    let in_line = async |waiting: usize| {
        let standing = async {
            while looker.info("scheduler").await.expect("answered").waiters.len() != waiting {
                tokio::time::sleep(ms(2)).await;
            }
        };
        timeout(LONG, standing).await.unwrap_or_else(|_| panic!("never {waiting} in line"));
    };
    let mut first = candidate(&url, dir.path());
    let a = leads(&mut first).await;
    let mut second = candidate(&url, dir.path());
    in_line(1).await;
    let mut third = candidate(&url, dir.path());
    in_line(2).await;

    // Killed: the next candidate leads.
    let mut death = Event::now(0, "scheduler", EventKind::ReleaseCalled).fence(a);
    death.pid = first.pid();
    HistoryWriter::open(dir.path()).expect("a history").record(&death);
    first.kill9();
    let b = leads(&mut second).await;
    let leader = looker.elect("scheduler").leader().await.expect("answered").expect("somebody leads");
    assert_eq!(leader.owner.pid(), second.pid());

    // Stopped for longer than its lease: another candidate leads. When it resumes, its work is cancelled and it runs again.
    second.pause();
    let c = leads(&mut third).await;
    second.resume();
    let ended = second.wait_for_line(|line| line["ended"].is_u64(), LONG).await.expect("told in time");
    assert!(ended["ended"] == b && ended["lost"].is_string(), "{ended}");
    in_line(1).await;

    // Resigned: the former leader leads again.
    third.send_line("resign");
    let d = leads(&mut second).await;
    third.wait_for_line(|line| line["resigned"] == true, LONG).await.expect("ended");
    assert!([a, b, c, d].is_sorted_by(|a, b| a < b), "fences rise: {a} {b} {c} {d}");
    second.send_line("resign");
    second.wait_for_line(|line| line["resigned"] == true, LONG).await.expect("ended");

    let history = History::read(dir.path()).expect("a history");
    assert_eq!(history.grants(), 4);
    assert!(history.overlaps().is_empty(), "two leaders: {:?}", history.overlaps());
    assert!(history.fence_inversions().is_empty(), "{:?}", history.fence_inversions());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_and_stopped_leaders_on_sqlite() {
    killed_and_stopped_leaders(Kind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_and_stopped_leaders_on_redis() {
    killed_and_stopped_leaders(Kind::Redis).await;
}

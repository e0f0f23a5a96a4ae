//! The SQLite store in one process: every operation, two stores on one file, and errors.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use leasehold::events::{EventKind, LockEvent};
use leasehold::inspect::{EvictMode, Evicted, FinishRequest};
use leasehold::lease::{Token, Ttl};
use leasehold::store::sqlite::SqliteStore;
use leasehold::store::*;
use leasehold::{LockName, Owner};

fn name(text: &str) -> LockName {
    LockName::new(text).expect("a valid name")
}

fn claim(text: &str) -> AcquireRequest {
    AcquireRequest {
        name: name(text),
        token: Token::random(),
        ttl: Ttl::new(Duration::from_secs(60)).expect("valid"),
        owner: Owner::default(),
        fenced: true,
        listens: true,
        since_ms: 1,
    }
}

fn open(dir: &tempfile::TempDir) -> SqliteStore {
    SqliteStore::open(&dir.path().join("locks.db")).expect("opens")
}

async fn granted(store: &SqliteStore, claim: &AcquireRequest) -> Grant {
    match store.try_acquire(claim).await.expect("answers") {
        Try::Granted(grant) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

async fn queued(store: &SqliteStore, claim: &AcquireRequest) -> Place {
    match store.acquire(claim, None).await.expect("answers") {
        Acquire::Queued(place) => place,
        other => panic!("not queued: {other:?}"),
    }
}

fn renewal(claim: &AcquireRequest, grant: &Grant) -> Renewal {
    Renewal {
        name: claim.name.clone(),
        token: claim.token.clone(),
        fence: grant.fence,
        ttl: claim.ttl,
        prolong: true,
        rewrite: None,
        hand_to: None,
    }
}

async fn push(pushes: &mut tokio::sync::mpsc::UnboundedReceiver<Push>) -> Push {
    tokio::time::timeout(Duration::from_secs(5), pushes.recv()).await.expect("a push in time").expect("store is open")
}

/// Every process leaves its FIFO behind. FIFOs of dead processes are removed unless a lease needs one as proof of the death.
#[tokio::test]
async fn many_short_runs_leave_few_files_and_no_lease_behind() {
    const RUNS: usize = 300;
    let dir = tempfile::tempdir().expect("a directory");
    let files = || std::fs::read_dir(dir.path().join("locks.db.alive")).expect("a directory").count();
    let died = open(&dir);
    let hour = Ttl::new(Duration::from_secs(3_600)).expect("valid");
    granted(&died, &AcquireRequest { ttl: hour, ..claim("left behind") }).await;
    died.close().await;
    let mut most = 0;
    for _ in 0..RUNS {
        let store = open(&dir);
        let short = claim("k");
        granted(&store, &short).await;
        assert_eq!(store.release(&short.name, &short.token).await, Ok(Release::Released));
        store.close().await;
        most = most.max(files());
    }
    assert!(most <= 40, "{most} files after {RUNS} runs");
    println!("{RUNS} runs: {most} files at most");
    granted(&open(&dir), &claim("left behind")).await;
}

/// No other process can wake it up, so it reads its inbox by itself before an unconfirmed grant ends.
#[tokio::test]
async fn a_waiter_whose_fifo_was_removed_still_receives_its_grant() {
    let dir = tempfile::tempdir().expect("a directory");
    let (holder, waiter) = (open(&dir), open(&dir));
    let mut pushes = waiter.pushes();
    let (first, second) = (claim("k"), claim("k"));
    granted(&holder, &first).await;
    queued(&waiter, &second).await;
    // It wakes up when it begins to wait, which could find the message by chance.
    tokio::time::sleep(Duration::from_millis(200)).await;
    std::fs::remove_dir_all(dir.path().join("locks.db.alive")).expect("removed");
    assert_eq!(holder.release(&first.name, &first.token).await, Ok(Release::Released));
    let handed = holder.holder(&first.name).await.expect("answers").expect("held");
    assert_eq!(handed.id, second.token.holder_id());
    let Push::Granted { token, grant } = push(&mut pushes).await else { panic!("no grant") };
    assert_eq!((token, grant.fence), (second.token, handed.fence), "that grant, and not a later one");
}

/// Otherwise a waiter would believe a grant that was taken away before the answer.
#[tokio::test]
async fn a_message_is_received_before_a_later_request_is_answered() {
    for leaves in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let (holder, waiter) = (open(&dir), open(&dir));
        let mut pushes = waiter.pushes();
        // It reads its messages only when it is woken up, or to answer a request.
        waiter.set_looks_around(false);
        let [first, second, third] = [(); 3].map(|()| claim("k"));
        granted(&holder, &first).await;
        let ticket = queued(&waiter, &second).await.ticket;
        // It wakes itself up when it begins to wait, which would find the messages by chance.
        tokio::time::sleep(Duration::from_millis(200)).await;
        std::fs::remove_dir_all(dir.path().join("locks.db.alive")).expect("removed");
        assert_eq!(holder.release(&first.name, &first.token).await, Ok(Release::Released));
        let handed = holder.holder(&first.name).await.expect("answers").expect("held");
        let evicted = holder.evict(&first.name, handed.id, EvictMode::Force).await;
        assert!(matches!(evicted, Ok(Evicted::Done(_))), "{evicted:?}");
        granted(&holder, &third).await;
        assert!(pushes.try_recv().is_err(), "no message was read yet");
        if leaves {
            assert_eq!(waiter.leave(&second).await, Ok(Left::WasWaiting));
        } else {
            let answer = waiter.acquire(&second, Some(ticket)).await;
            assert!(matches!(answer, Ok(Acquire::Queued(_))), "{answer:?}");
        }
        let received = [pushes.try_recv(), pushes.try_recv()];
        assert!(matches!(received, [Ok(Push::Granted { .. }), Ok(Push::Revoked { .. })]), "{received:?}");
    }
}

/// Commands that arrive together share a transaction, which renews on a shorter path.
#[tokio::test]
async fn checks_that_arrive_together_prolong_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(&dir);
    let mine = claim("k");
    let grant = granted(&store, &mine).await;
    let longer = Ttl::new(Duration::from_secs(3_600)).expect("valid");
    let checks = [Renewal { ttl: longer, prolong: false, ..renewal(&mine, &grant) }];
    let answers = futures_util::future::join_all((0..200).map(|_| store.renew(&checks))).await;
    assert!(answers.iter().all(|answer| *answer == [Renewed::Renewed]), "{answers:?}");
    let holder = store.holder(&mine.name).await.expect("answers").expect("held");
    assert!(holder.ttl_left.expect("an end") <= mine.ttl.duration(), "a check prolonged the lease: {holder:?}");
}

#[tokio::test]
async fn a_lock_is_acquired_once_and_released_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(&dir);
    let (a, b) = (claim("k"), claim("k"));
    let first = granted(&store, &a).await;
    let Try::Held(Some(holder)) = store.try_acquire(&b).await.expect("answers") else { panic!("two holders") };
    assert_eq!(holder.id, a.token.holder_id());
    assert_eq!(holder.fence, first.fence);
    assert_eq!(granted(&store, &a).await.fence, first.fence, "a re-sent try is the same grant");
    assert_eq!(store.release(&b.name, &b.token).await, Ok(Release::NotOwner));
    assert_eq!(store.release(&a.name, &a.token).await, Ok(Release::Released));
    assert_eq!(store.release(&a.name, &a.token).await, Ok(Release::NotOwner));
    assert!(granted(&store, &b).await.fence > first.fence, "fences rise");
    assert_eq!(store.holder(&a.name).await.expect("answers").map(|h| h.id), Some(b.token.holder_id()));
}

#[tokio::test]
async fn a_release_hands_over_in_order_within_and_across_stores() {
    let dir = tempfile::tempdir().expect("a directory");
    let (one, two) = (open(&dir), open(&dir));
    let (mut to_one, mut to_two) = (one.pushes(), two.pushes());
    let (a, b, c) = (claim("k"), claim("k"), claim("k"));
    granted(&one, &a).await;
    assert_eq!(queued(&two, &b).await.position, 0);
    let place = queued(&one, &c).await;
    assert_eq!((place.position, place.holder.map(|h| h.id)), (1, Some(a.token.holder_id())));
    assert_eq!(two.queue(&a.name).await.expect("answers").len(), 2);
    assert!(matches!(two.try_acquire(&claim("k")).await, Ok(Try::Held(_))));

    assert_eq!(one.release(&a.name, &a.token).await, Ok(Release::Released));
    let Push::Granted { token, grant } = push(&mut to_two).await else { panic!("no grant") };
    assert_eq!((&token, grant.lasts), (&b.token, Duration::from_secs(2)));
    assert!(matches!(push(&mut to_one).await, Push::LookAgain { token, .. } if token == c.token));
    assert_eq!(two.renew(&[renewal(&b, &grant)]).await, [Renewed::Renewed]);
    let left = two.holder(&b.name).await.expect("answers").expect("held").ttl_left.expect("ends");
    assert!(left > Duration::from_secs(50), "confirmed in full, {left:?} left");

    assert_eq!(two.release(&b.name, &b.token).await, Ok(Release::Released));
    assert!(matches!(push(&mut to_one).await, Push::Granted { token, .. } if token == c.token));
    assert_eq!(one.leave(&c).await, Ok(Left::WasGranted));
    assert_eq!(one.holder(&c.name).await, Ok(None));
}

#[tokio::test]
async fn evictions_and_requests_to_finish_reach_the_holder() {
    let dir = tempfile::tempdir().expect("a directory");
    let (one, two) = (open(&dir), open(&dir));
    let mut pushes = one.pushes();
    let a = claim("k");
    let grant = granted(&one, &a).await;
    let id = a.token.holder_id();
    assert!(matches!(two.ask_to_finish(&a.name, id, "lunch").await, Ok(FinishRequest::Delivered(_))));
    assert!(matches!(push(&mut pushes).await, Push::Finish { reason, .. } if reason == "lunch"));
    let other = Token::random().holder_id();
    assert!(matches!(two.evict(&a.name, other, EvictMode::Force).await, Ok(Evicted::ChangedHands(_))));
    assert!(matches!(two.evict(&a.name, id, EvictMode::Revoke).await, Ok(Evicted::Done(_))));
    assert!(matches!(push(&mut pushes).await, Push::Revoked { token } if token == a.token));
    assert_eq!(one.renew(&[renewal(&a, &grant)]).await, [Renewed::Revoked]);
    assert_eq!(one.try_acquire(&a).await, Ok(Try::Revoked));
    assert!(matches!(two.try_acquire(&claim("k")).await, Ok(Try::Held(Some(h))) if h.revoked));
    assert!(matches!(two.evict(&a.name, id, EvictMode::Force).await, Ok(Evicted::Done(_))));
    assert_eq!(two.evict(&a.name, id, EvictMode::Force).await, Ok(Evicted::Free));
    assert_eq!(one.renew(&[renewal(&a, &grant)]).await, [Renewed::Lost]);
}

#[tokio::test]
async fn an_ended_lease_is_free_and_its_fence_is_not_reused() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(&dir);
    let (a, b) = (claim("k"), claim("k"));
    let first = granted(&store, &a).await;
    store.expire(&a.name);
    assert_eq!(store.holder(&a.name).await, Ok(None));
    assert_eq!(store.renew(&[renewal(&a, &first)]).await, [Renewed::Lost]);
    assert!(granted(&store, &b).await.fence > first.fence);
    assert_eq!(store.release(&a.name, &a.token).await, Ok(Release::NotOwner));
}

#[tokio::test]
async fn only_leases_of_a_closed_store_are_free_at_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let (one, two) = (open(&dir), open(&dir));
    let (a, mut nobody) = (claim("a"), claim("b"));
    nobody.listens = false;
    granted(&one, &a).await;
    granted(&one, &nobody).await;
    one.close().await;
    assert_eq!(one.try_acquire(&claim("c")).await.map_err(|e| e.kind()), Err(StoreErrorKind::Closed));
    drop(one);
    assert_eq!(two.holder(&a.name).await, Ok(None));
    granted(&two, &claim("a")).await;
    assert!(matches!(two.try_acquire(&claim("b")).await, Ok(Try::Held(Some(_)))));
}

#[tokio::test]
async fn dead_waiters_are_passed_over_however_many() {
    let dir = tempfile::tempdir().expect("a directory");
    let (one, two, dead) = (open(&dir), open(&dir), open(&dir));
    let mut pushes = two.pushes();
    let a = claim("k");
    granted(&one, &a).await;
    for _ in 0..450 {
        queued(&dead, &claim("k")).await;
    }
    let last = claim("k");
    assert_eq!(queued(&two, &last).await.position, 450);
    dead.close().await;
    assert_eq!(one.release(&a.name, &a.token).await, Ok(Release::Released));
    loop {
        if let Push::Granted { token, .. } = push(&mut pushes).await {
            assert_eq!(token, last.token);
            break;
        }
    }
    assert_eq!(two.queue(&a.name).await.expect("answers").len(), 0);
}

#[tokio::test]
async fn lists_counts_and_events() {
    let dir = tempfile::tempdir().expect("a directory");
    let (one, two) = (open(&dir), open(&dir));
    let mut events = two.follow().await.expect("follows");
    for i in 0..700 {
        granted(&one, &claim(&format!("list:{i:03}"))).await;
    }
    granted(&one, &claim("other")).await;
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        let page = two.list("list:", after, 300).await.expect("answers");
        seen.extend(page.locks.into_iter().map(|(name, _)| name.to_string()));
        let Some(next) = page.next else { break };
        after = Some(next);
    }
    assert_eq!(seen, (0..700).map(|i| format!("list:{i:03}")).collect::<Vec<_>>());
    assert_eq!(two.long_held(None, usize::MAX).await.expect("answers").locks.len(), 701);
    one.count(&[("a", 2), ("b", 1)]).await.expect("counts");
    two.count(&[("a", 3)]).await.expect("counts");
    assert_eq!(one.counters().await, Ok(vec![("a".into(), 5), ("b".into(), 1)]));
    let event = LockEvent {
        kind: EventKind::Released,
        name: "k".into(),
        owner: "me".into(),
        holder_id: "x".into(),
        fence: Some(1),
        at_ms: 2,
        reason: "normal".into(),
    };
    one.note(vec![Note::Tell(event.clone())]).await.expect("notes");
    let heard = tokio::time::timeout(Duration::from_secs(3), events.recv()).await.expect("in time");
    assert_eq!(heard, Some(event));
    assert!(one.describe().starts_with("sqlite:/"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn eight_tasks_on_two_stores_are_never_inside_together() {
    let dir = tempfile::tempdir().expect("a directory");
    let stores = [Arc::new(open(&dir)), Arc::new(open(&dir))];
    let (inside, fence, rounds) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicUsize::new(0)));
    let until = Instant::now() + Duration::from_secs(2);
    let tasks: Vec<_> = (0..8)
        .map(|i| {
            let (store, inside, fence, rounds) = (stores[i % 2].clone(), inside.clone(), fence.clone(), rounds.clone());
            tokio::spawn(async move {
                while Instant::now() < until {
                    let claim = claim("hot");
                    if let Try::Granted(grant) = store.try_acquire(&claim).await.expect("answers") {
                        assert_eq!(inside.fetch_add(1, SeqCst), 0, "two holders at once");
                        let now = grant.fence.expect("fenced").get();
                        assert!(fence.swap(now, SeqCst) < now, "fence did not rise");
                        tokio::task::yield_now().await;
                        inside.fetch_sub(1, SeqCst);
                        assert_eq!(store.release(&claim.name, &claim.token).await, Ok(Release::Released));
                        rounds.fetch_add(1, SeqCst);
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no assertion failed");
    }
    println!("{} rounds", rounds.load(SeqCst));
    assert!(rounds.load(SeqCst) > 100);
}

#[tokio::test]
async fn a_forked_store_fails_and_does_not_hang() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(&dir);
    let a = claim("k");
    let grant = granted(&store, &a).await;
    store.pretend_forked(true);
    let forked = |e: StoreError| e.kind() == StoreErrorKind::Forked;
    assert!(store.try_acquire(&a).await.is_err_and(forked));
    assert!(store.release(&a.name, &a.token).await.is_err_and(forked));
    assert!(store.holder(&a.name).await.is_err_and(forked));
    assert!(matches!(&store.renew(&[renewal(&a, &grant)]).await[..], [Renewed::Unknown(e)] if forked(e.clone())));
    store.close().await;
    store.pretend_forked(false);
    assert_eq!(store.release(&a.name, &a.token).await, Ok(Release::Released), "the parent goes on");
}

fn refusal(path: &Path) -> StoreErrorKind {
    SqliteStore::open(path).err().expect("refused").kind()
}

#[test]
fn foreign_databases_are_not_changed() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("text.db");
    std::fs::write(&file, "not a database, but long enough to look like one".repeat(100)).expect("writes");
    assert_eq!(refusal(&file), StoreErrorKind::File);
    assert_eq!(refusal(dir.path()), StoreErrorKind::File);
    assert_eq!(refusal(&file.join("below-a-file.db")), StoreErrorKind::File);
    assert_eq!(refusal(Path::new("/proc/locks.db")), StoreErrorKind::File);
    drop(open(&dir));
    let path = dir.path().join("locks.db");
    let mut header = std::fs::read(&path).expect("reads");
    header[60..64].copy_from_slice(&9_i32.to_be_bytes());
    let newer = dir.path().join("newer.db");
    std::fs::write(&newer, header).expect("writes");
    assert_eq!(refusal(&newer), StoreErrorKind::NewerVersion);
}

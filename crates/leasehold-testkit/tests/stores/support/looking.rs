//! Inspection of locks, queues, counters and events.

use std::collections::HashMap;

use leasehold::events::{EventKind, LockEvent};
use leasehold::store::Note;

use super::*;

/// Returns every lock of a list and how often it was listed.
async fn pages(store: &dyn Store, prefix: &str, limit: usize) -> HashMap<String, usize> {
    let (mut shown, mut cursor) = (HashMap::new(), None);
    for _ in 0..10_000 {
        let page = store.list(prefix, cursor, limit).await.expect("a page");
        let mut here = HashMap::new();
        for (name, holder) in page.locks {
            assert!(!holder.foreign, "{name}");
            *here.entry(name.to_string()).or_insert(0) += 1;
            *shown.entry(name.to_string()).or_insert(0) += 1;
        }
        assert!(here.values().all(|times| *times == 1), "twice on one page");
        cursor = page.next;
        if cursor.is_none() {
            return shown;
        }
    }
    panic!("a list without an end");
}

pub(crate) async fn a_list_has_every_lock_once(world: &impl World) {
    let store = world.open().await;
    for i in 0..2_500 {
        takes(&*store, &claim(&format!("page:{i}"))).await;
    }
    for i in 0..20 {
        takes(&*store, &claim(&format!("gpu_lock:{i}"))).await;
    }
    for limit in [100, 10_000] {
        let all = pages(&*store, "", limit).await;
        assert_eq!(all.len(), 2_520);
        assert!(all.contains_key("page:2499") && all.contains_key("gpu_lock:19"));
    }
}

pub(crate) async fn a_list_keeps_to_its_prefix(world: &impl World) {
    let store = world.open().await;
    for lock in ["a*b:1", "a*b:2", "axb:3", "gpu_lock:1", "gpu", "task_lock:1"] {
        takes(&*store, &claim(lock)).await;
    }
    for (prefix, count) in [("a*", 2), ("a", 3), ("gpu", 2), ("gpu_lock:", 1), ("task_lock:1", 1), ("none", 0), ("", 6)]
    {
        let found = pages(&*store, prefix, 10).await;
        assert_eq!(found.len(), count, "{prefix}: {found:?}");
    }
}

pub(crate) async fn a_queue_is_shown_in_order(world: &impl World) {
    let store = world.open().await;
    assert_eq!(store.queue(&name("a")).await, Ok(vec![]));
    takes(&*store, &claim("a")).await;
    let (first, second) = (claim("a"), AcquireRequest { listens: false, since_ms: 7, ..claim("a") });
    let tickets = [queues(&*store, &first).await.ticket, queues(&*store, &second).await.ticket];
    let queue = store.queue(&name("a")).await.expect("a queue");
    assert_eq!(queue.iter().map(|w| w.ticket).collect::<Vec<_>>(), tickets);
    assert_eq!((queue[0].since_ms, queue[0].listens), (first.since_ms, true));
    assert_eq!((queue[1].since_ms, queue[1].listens), (7, false));
    assert_eq!(queue[0].owner, first.owner);
}

pub(crate) async fn counters_add_up(world: &impl World) {
    let (here, there) = (world.open().await, world.open().await);
    assert_eq!(here.counters().await, Ok(vec![]));
    here.count(&[("acquired", 2), ("lost", 1)]).await.expect("counted");
    there.count(&[("acquired", 40)]).await.expect("counted");
    let counters = here.counters().await.expect("counters");
    assert_eq!(counters, [("acquired".to_owned(), 42), ("lost".to_owned(), 1)]);
}

pub(crate) async fn events_reach_a_follower(world: &impl World) {
    let (here, there) = (world.open().await, world.open().await);
    let mut events = there.follow().await.expect("a follower");
    let event = LockEvent {
        kind: EventKind::Released,
        name: "a \"quoted\" näme".into(),
        owner: "battery@host:1".into(),
        holder_id: "0123456789ab".into(),
        fence: Some(7),
        at_ms: 1,
        reason: "normal".into(),
    };
    here.note(vec![Note::Tell(event.clone())]).await.expect("noted");
    let heard = timeout(Duration::from_secs(5), events.recv()).await.expect("an event");
    assert_eq!(heard, Some(event));
}

/// Returns every page of the long-held locks. No page may be much longer than requested.
async fn all_long_held(store: &dyn Store) -> Vec<(LockName, Holder)> {
    let (mut found, mut cursor) = (Vec::new(), None);
    for _ in 0..1_000 {
        let page = store.long_held(cursor, 100).await.expect("an index");
        assert!(page.locks.len() <= 300, "{} on one page", page.locks.len());
        found.extend(page.locks);
        cursor = page.next;
        if cursor.is_none() {
            return found;
        }
    }
    panic!("an index without an end");
}

pub(crate) async fn long_held_locks_come_in_pages(world: &impl World) {
    let (here, there) = (world.open().await, world.open().await);
    let mut names = HashMap::new();
    for i in 0..1_200 {
        let held = claim(&if i % 3 == 0 { format!("gpu_lock:{i}") } else { format!("long:{i}") });
        takes(&*here, &held).await;
        let (name, holder) = (held.name.clone(), held.token.holder_id());
        here.note(vec![Note::Enter { name: name.clone(), holder, lasts: LONG }]).await.expect("noted");
        names.insert(name.to_string(), holder);
    }
    let found: HashMap<_, _> =
        all_long_held(&*there).await.into_iter().map(|(name, holder)| (name.to_string(), holder.id)).collect();
    assert_eq!(found, names, "every one of them, with its holder");
}

pub(crate) async fn long_held_locks_are_found(world: &impl World) {
    let (here, there) = (world.open().await, world.open().await);
    let (long, gone) = (claim("long"), claim("gone"));
    for held in [&long, &gone] {
        takes(&*here, held).await;
        let (name, holder) = (held.name.clone(), held.token.holder_id());
        here.note(vec![Note::Enter { name, holder, lasts: LONG }]).await.expect("noted");
    }
    assert_eq!(all_long_held(&*there).await.len(), 2);
    // Freed without an event: the index still lists it, but the lock is free.
    here.release(&gone.name, &gone.token).await.expect("an answer");
    let found = all_long_held(&*there).await;
    assert_eq!(found.iter().map(|(_, h)| h.id).collect::<Vec<_>>(), [long.token.holder_id()]);
    here.release(&long.name, &long.token).await.expect("an answer");
    let note = Note::Remove { name: long.name.clone(), holder: long.token.holder_id() };
    here.note(vec![note]).await.expect("noted");
    assert_eq!(all_long_held(&*there).await, []);
}

//! Managers with different namespaces on one store share only its raw names.

use std::time::Duration;

use leasehold::LockManager;
use leasehold::events::EventKind;
use leasehold::inspect::EvictMode;
use leasehold::store::{KeySpace, Namespace, RawPattern};
use leasehold_testkit::{Arena, Kind, on_every_store};
use tokio::time::timeout;

/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(
    a_name_is_another_lock_in_another_namespace,
    raw_names_are_shared_by_all_namespaces,
    no_namespace_can_reach_into_another,
    lists_show_the_names_of_their_namespace,
    followers_and_counters_are_of_their_namespace,
    a_queue_is_of_its_namespace,
);

fn keys(namespace: &str) -> KeySpace {
    let raw = ["gpu_lock:*", "task_lock:*"].map(|pattern| RawPattern::new(pattern).expect("a pattern"));
    KeySpace::new(Namespace::new(namespace).expect("a namespace"), raw.into()).expect("keys")
}

async fn manager(arena: &Arena, keys: KeySpace) -> LockManager {
    let mut options = arena.options();
    options.keys = keys;
    arena.manager_with(options).await
}

fn names(page: &leasehold::inspect::Page) -> Vec<&str> {
    let mut names: Vec<_> = page.locks.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    names
}

async fn a_name_is_another_lock_in_another_namespace(arena: Arena) {
    let (default, a, b) = (arena.manager().await, manager(&arena, keys("a")).await, manager(&arena, keys("b")).await);
    let all = [&default, &a, &b];
    let mut guards = Vec::new();
    for manager in all {
        assert!(!manager.is_locked("order:1").await.expect("answered"));
        guards.push(manager.try_lock("order:1").await.expect("answered").expect("free in this namespace"));
        assert!(manager.try_lock("order:1").await.expect("answered").is_none(), "and held in it from now on");
    }
    for (manager, guard) in all.into_iter().zip(guards) {
        let holder = manager.holder("order:1").await.expect("answered").expect("held");
        assert_eq!(holder.id, guard.holder_id());
        for other in all {
            let same = std::ptr::eq(other, manager);
            let evicted = other.evict("order:1", holder.id, EvictMode::Revoke, "test").await.expect("answered");
            assert_eq!(matches!(evicted, leasehold::inspect::Evicted::Done(_)), same, "{evicted:?}");
        }
        assert!(guard.release().await.expect("answered"));
        assert!(!manager.is_locked("order:1").await.expect("answered"));
    }
}

async fn raw_names_are_shared_by_all_namespaces(arena: Arena) {
    let empty = KeySpace::new(Namespace::new("").expect("a namespace"), vec![]).expect("keys");
    let (a, b, raw) = (arena.manager().await, manager(&arena, keys("b")).await, manager(&arena, empty).await);
    for name in ["gpu_lock:0", "task_lock:x"] {
        for (one, others) in [(&a, [&b, &raw]), (&b, [&a, &raw]), (&raw, [&a, &b])] {
            let guard = one.lock(name).await.expect("free");
            for other in others {
                assert!(other.try_lock(name).await.expect("answered").is_none(), "{name} is one lock for all");
                let holder = other.holder(name).await.expect("answered").expect("seen");
                assert_eq!(holder.id, guard.holder_id());
            }
            let waiting = tokio::spawn(others[0].lock(name).wait_up_to(LONG).into_future());
            timeout(LONG, async {
                while one.info(name).await.expect("answered").waiters.is_empty() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
            .await
            .expect("it stands in line");
            assert!(guard.release().await.expect("answered"));
            let next = timeout(LONG, waiting).await.expect("in time").expect("no panic").expect("handed on");
            assert!(next.release().await.expect("answered"));
        }
    }
}

/// Two names never have the same key.
async fn no_namespace_can_reach_into_another(arena: Arena) {
    let only = |ns: &str| KeySpace::new(Namespace::new(ns).expect("a namespace"), vec![]).expect("keys");
    let managers = [
        arena.manager().await,
        manager(&arena, only("leasehold")).await,
        manager(&arena, only("b")).await,
        manager(&arena, only("")).await,
    ];
    let mut guards = Vec::new();
    for (manager, name) in
        [(0, "x"), (0, "b:lock:x"), (0, "leasehold:lock:x"), (2, "x"), (3, "x"), (1, "gpu_lock:7"), (0, "gpu_lock:7")]
    {
        let guard = managers[manager].try_lock(name).await.expect("answered");
        guards.push(guard.unwrap_or_else(|| panic!("{name} of manager {manager} shares a key")));
    }
    // The same key in two spellings.
    assert!(managers[3].try_lock("b:lock:x").await.expect("answered").is_none());
    assert!(managers[3].try_lock("leasehold:lock:x").await.expect("answered").is_none());
    assert!(managers[1].try_lock("x").await.expect("answered").is_none());
}

async fn lists_show_the_names_of_their_namespace(arena: Arena) {
    let (a, b) = (arena.manager().await, manager(&arena, keys("b")).await);
    let mut guards = Vec::new();
    for name in ["job:1", "job:2", "gpu_lock:0", "gp"] {
        guards.push(a.lock(name).await.expect("free"));
    }
    for name in ["job:2", "job:3", "task_lock:9"] {
        guards.push(b.lock(name).await.expect("free"));
    }
    let list = async |manager: &LockManager, prefix| manager.list(prefix, None, 100).await.expect("answered");
    assert_eq!(names(&list(&a, "").await), ["gp", "gpu_lock:0", "job:1", "job:2", "task_lock:9"]);
    assert_eq!(names(&list(&b, "").await), ["gpu_lock:0", "job:2", "job:3", "task_lock:9"]);
    assert_eq!(names(&list(&a, "job:").await), ["job:1", "job:2"]);
    assert_eq!(names(&list(&b, "job:").await), ["job:2", "job:3"]);
    assert_eq!(names(&list(&a, "gp").await), ["gp", "gpu_lock:0"]);
    assert_eq!(names(&list(&b, "gpu_lock:").await), ["gpu_lock:0"]);
    assert_eq!(names(&list(&b, "leasehold").await), [""; 0]);
    // Page by page, every lock once.
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let page = a.list("", after, 2).await.expect("answered");
        seen.extend(names(&page).into_iter().map(str::to_owned));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    seen.sort();
    assert_eq!(seen, ["gp", "gpu_lock:0", "job:1", "job:2", "task_lock:9"]);
    timeout(LONG, async {
        loop {
            let long: Vec<_> = b.long_held().await.expect("answered").into_iter().map(|(name, _)| name).collect();
            assert!(long.iter().all(|name| !["gp", "job:1"].contains(&name.as_str())), "{long:?}");
            // Also raw names that clients of another namespace hold.
            if ["job:3", "gpu_lock:0"].iter().all(|wanted| long.iter().any(|name| name.as_str() == *wanted)) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("entered");
}

async fn followers_and_counters_are_of_their_namespace(arena: Arena) {
    let (a, b, looker) = (arena.manager().await, manager(&arena, keys("b")).await, manager(&arena, keys("b")).await);
    let mut events = looker.events().await.expect("following");
    // Every release of a raw name is published, in the namespace of its holder.
    a.lock("gpu_lock:0").await.expect("free").release().await.expect("answered");
    for _ in 0..2 {
        b.lock("task_lock:1").await.expect("free").release().await.expect("answered");
    }
    for _ in 0..2 {
        let event = timeout(LONG, events.recv()).await.expect("told").expect("open");
        assert_eq!((event.kind, event.name.as_str()), (EventKind::Released, "task_lock:1"));
    }
    a.shutdown().await;
    b.shutdown().await;
    let total = async |manager: &LockManager| {
        let counters = manager.fleet_counters().await.expect("answered");
        counters.iter().find(|(name, _)| name == "total_locks").map(|(_, n)| *n)
    };
    assert_eq!(total(&looker).await, Some(2));
    assert_eq!(total(&arena.manager().await).await, Some(1));
}

async fn a_queue_is_of_its_namespace(arena: Arena) {
    let (a, b) = (arena.manager().await, manager(&arena, keys("b")).await);
    let (first, other) = (a.lock("line").await.expect("free"), b.lock("line").await.expect("free"));
    let waiting = tokio::spawn(b.lock("line").wait_up_to(LONG).into_future());
    timeout(LONG, async {
        while b.info("line").await.expect("answered").waiters.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .expect("it stands in line");
    assert!(a.info("line").await.expect("answered").waiters.is_empty());
    first.release().await.expect("answered");
    assert!(!waiting.is_finished(), "another lock was given back");
    if arena.kind() == Kind::Redis {
        let key = arena.server().command(&["EXISTS", "b:lock:line"]).await;
        assert_eq!(key, ::redis::Value::Int(1));
    }
    other.release().await.expect("answered");
    let guard = timeout(LONG, waiting).await.expect("in time").expect("no panic").expect("its turn");
    assert!(guard.release().await.expect("answered"));
}

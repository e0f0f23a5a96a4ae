//! Leases without a guard: detached from a guard, or acquired under a token of the caller's choice.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::lease::{Lease, Token, Ttl};
use leasehold::{Error, Fence, LockManager};
use leasehold_testkit::{Arena, on_every_store};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::managers::wait_for_waiters;

/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(
    a_token_can_be_handed_on,
    a_token_that_was_waited_for_can_be_handed_on,
    a_chosen_token_waits_in_the_queue,
    one_request_that_waits_twice_is_one_lease,
    a_dropped_call_leaves_the_queue,
    a_wait_that_timed_out_leaves_the_queue,
    a_request_that_waited_belongs_to_no_process,
);

async fn a_token_can_be_handed_on(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let token = a.lock("handed").renew(false).await.expect("free").detach().await.expect("ours").into_token();
    a.shutdown().await;
    assert!(b.is_locked("handed").await.expect("answered"), "it belongs to no process");
    b.lease("handed", &token).expect("a name").renew(Ttl::default()).await.expect("ours");
    assert!(!b.lease("handed", &Token::random()).expect("a name").release_without_event().await.expect("answered"));
    assert!(b.lease("handed", &token).expect("a name").release_without_event().await.expect("answered"));
    assert!(!b.is_locked("handed").await.expect("answered"));
}

async fn a_token_that_was_waited_for_can_be_handed_on(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let first = b.lock("waited").await.expect("free");
    let waiter = tokio::spawn({
        let a = a.clone();
        async move {
            let guard = a.lock("waited").renew(false).wait_up_to(LONG).await.expect("its turn");
            guard.detach().await.expect("ours").into_token()
        }
    });
    wait_for_waiters(&b, "waited", 1).await;
    first.release().await.expect("answered");
    let token = timeout(LONG, waiter).await.expect("in time").expect("no panic");
    a.shutdown().await;
    let holder = b.holder("waited").await.expect("answered").expect("it belongs to no process");
    assert!(!holder.listens && holder.ttl_left.expect("ends") > Duration::from_secs(25), "{holder:?}");
    assert!(b.lease("waited", &token).expect("a name").release_without_event().await.expect("answered"));
}

async fn a_chosen_token_waits_in_the_queue(arena: Arena) {
    let looker = arena.manager().await;
    let first = looker.lock("line").await.expect("free");
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for i in 0..6 {
        let (manager, order) = (arena.manager().await, order.clone());
        tasks.push(tokio::spawn(async move {
            let request = manager.lock("line").wait_up_to(LONG);
            let entered = |fence: Option<Fence>| order.lock().expect("no panic before").push((i, fence));
            // Every other one by a token, the rest with guards.
            if i % 2 == 0 {
                let token = Token::random();
                entered(request.under_token(&token).await.expect("its turn").try_fence());
                assert!(
                    manager.lease("line", &token).expect("a name").release_without_event().await.expect("answered")
                );
            } else {
                let guard = request.await.expect("its turn");
                entered(guard.try_fence());
                assert!(guard.release().await.expect("answered"));
            }
        }));
        wait_for_waiters(&looker, "line", i + 1).await;
    }
    assert!(first.release().await.expect("answered"));
    for task in tasks {
        timeout(LONG, task).await.expect("in time").expect("no panic");
    }
    let order = std::mem::take(&mut *order.lock().expect("no panic before"));
    assert_eq!(order.iter().map(|(i, _)| *i).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert!(order.is_sorted_by(|a, b| a.1 < b.1), "fences rise: {order:?}");
    assert!(!looker.is_locked("line").await.expect("answered"));
}

async fn one_request_that_waits_twice_is_one_lease(arena: Arena) {
    let (a, b, c) = (arena.manager().await, arena.manager().await, arena.manager().await);
    let first = a.lock("twice").await.expect("free");
    let token = Token::random();
    // Repeated in the same process and in another one, while the first call still waits.
    let calls = [waiting(&b, &token), waiting(&b, &token), waiting(&c, &token)];
    wait_for_waiters(&a, "twice", 2).await;
    assert!(first.release().await.expect("answered"));
    let mut fences = Vec::new();
    for call in calls {
        let lease = timeout(LONG, call).await.expect("in time").expect("no panic").expect("its turn");
        fences.push(lease.try_fence());
    }
    assert!(fences[0].is_some() && fences.iter().all(|fence| *fence == fences[0]), "one lease: {fences:?}");
    let holder = a.holder("twice").await.expect("answered").expect("held");
    assert_eq!((holder.id, holder.fence), (token.holder_id(), fences[0]));
    wait_for_waiters(&a, "twice", 0).await;
    assert!(b.lease("twice", &token).expect("a name").release_without_event().await.expect("answered"));
    assert!(a.try_lock("twice").await.expect("answered").is_some(), "free at once: nobody of them waits any more");
}

async fn a_dropped_call_leaves_the_queue(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let first = a.lock("twice").await.expect("free");
    let call = waiting(&b, &Token::random());
    wait_for_waiters(&a, "twice", 1).await;
    call.abort();
    wait_for_waiters(&a, "twice", 0).await;
    assert!(first.release().await.expect("answered"));
    assert!(b.try_lock("twice").await.expect("answered").is_some());
}

async fn a_wait_that_timed_out_leaves_the_queue(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let first = a.lock("over").owner("alice").await.expect("free");
    let request = b.lock("over").wait_up_to(Duration::from_millis(100));
    let Err(Error::NotAcquired { holder, waited, .. }) = request.under_token(&Token::random()).await else {
        panic!("held");
    };
    assert_eq!(holder.expect("known").owner.task(), "alice");
    assert!(waited >= Duration::from_millis(100), "{waited:?}");
    wait_for_waiters(&a, "over", 0).await;
    assert!(first.release().await.expect("answered"));
    assert!(a.try_lock("over").await.expect("answered").is_some());
}

async fn a_request_that_waited_belongs_to_no_process(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let first = a.lock("twice").await.expect("free");
    let token = Token::random();
    let call = waiting(&b, &token);
    wait_for_waiters(&a, "twice", 1).await;
    assert!(first.release().await.expect("answered"));
    let lease = timeout(LONG, call).await.expect("in time").expect("no panic").expect("its turn");
    b.shutdown().await;
    let holder = a.holder("twice").await.expect("answered").expect("it outlives who asked for it");
    assert_eq!((holder.id, holder.fence, holder.listens), (token.holder_id(), lease.try_fence(), false));
    assert!(holder.ttl_left.expect("ends") > Duration::from_secs(25), "the whole ttl: {holder:?}");
    a.lease("twice", &token).expect("a name").renew(Ttl::default()).await.expect("its token renews it");
    assert!(a.lease("twice", &token).expect("a name").release_without_event().await.expect("answered"));
}

/// Starts a call that waits for `twice` under a token.
fn waiting(manager: &LockManager, token: &Token) -> JoinHandle<Result<Lease, Error>> {
    let (manager, token) = (manager.clone(), token.clone());
    tokio::spawn(async move { manager.lock("twice").wait_up_to(LONG).under_token(&token).await })
}

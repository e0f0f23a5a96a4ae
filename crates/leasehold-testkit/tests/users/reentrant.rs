//! Re-entry of a lock that the task already holds, on every store.

use std::time::Duration;

use futures_util::FutureExt;
use leasehold::inspect::EvictMode;
use leasehold::{Error, LockManager, LossReason, current_fence, lock};
use leasehold_testkit::{Arena, on_every_store};

const LONG: Duration = Duration::from_secs(20);

on_every_store!(
    a_task_enters_again_and_the_outermost_scope_releases,
    without_re_entry_a_task_blocks_itself,
    it_holds_across_awaits_and_between_others,
    a_spawned_task_does_not_inherit,
    an_error_or_a_panic_inside_leaves_the_lock_with_the_first,
    another_manager_is_another_holder,
    a_loss_ends_all_who_entered,
    the_outer_call_is_cancelled_first,
    the_attribute_enters_again_too,
);

async fn is_held(locks: &LockManager) -> bool {
    locks.is_locked("r").await.expect("answered")
}

/// Enters `r` without waiting, and returns its fence.
async fn again(locks: &LockManager) -> Result<u64, Error> {
    locks.lock("r").no_wait().run_reentrant(async |guard| guard.fence().get()).await
}

async fn a_task_enters_again_and_the_outermost_scope_releases(arena: Arena) {
    let locks = arena.manager().await;
    let first = locks.lock("r").run_reentrant(async |guard| {
        let fence = guard.fence().get();
        for _ in 0..3 {
            assert_eq!(again(&locks).await.expect("mine"), fence, "the same grant");
            assert!(is_held(&locks).await, "the inner ones give nothing back");
        }
        // Three levels.
        let deep = locks.lock("r").no_wait().run_reentrant(async |_| again(&locks).await).await;
        assert_eq!(deep.expect("mine").expect("mine"), fence);
        fence
    });
    let first = first.await.expect("free");
    assert!(!is_held(&locks).await, "the first one gave it back");
    assert_ne!(again(&locks).await.expect("free"), first, "another grant");
}

async fn without_re_entry_a_task_blocks_itself(arena: Arena) {
    let locks = arena.manager().await;
    let inner = locks.with_lock("r", async |_| locks.lock("r").no_wait().run(async |_| ()).await);
    assert!(matches!(inner.await.expect("free"), Err(Error::NotAcquired { .. })));
}

async fn it_holds_across_awaits_and_between_others(arena: Arena) {
    let locks = arena.manager().await;
    let outcome = locks.with_lock("r", async |_| {
        tokio::task::yield_now().await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        // Another lock in between does not hide it.
        let between = locks.with_lock("other", async |_| again(&locks).await).await.expect("free");
        // Side by side in one task.
        let (left, right) = tokio::join!(again(&locks), again(&locks));
        (between, left, right)
    });
    let (between, left, right) = outcome.await.expect("free");
    let fence = between.expect("mine");
    assert_eq!((left.expect("mine"), right.expect("mine")), (fence, fence));
    assert!(!is_held(&locks).await);
}

async fn a_spawned_task_does_not_inherit(arena: Arena) {
    let locks = arena.manager().await;
    let inner = locks.with_lock("r", async |_| {
        let locks = locks.clone();
        tokio::spawn(async move { again(&locks).await }).await.expect("no panic")
    });
    assert!(matches!(inner.await.expect("free"), Err(Error::NotAcquired { .. })));
}

async fn an_error_or_a_panic_inside_leaves_the_lock_with_the_first(arena: Arena) {
    let locks = arena.manager().await;
    let outcome = locks.with_lock("r", async |guard| {
        let failed: Result<Result<(), &str>, Error> = locks.lock("r").run_reentrant(async |_| Err("as asked")).await;
        assert_eq!(failed.expect("mine"), Err("as asked"));
        let panicking = locks.lock("r").run_reentrant(async |_| panic!("as asked"));
        let panicked: Result<Result<(), Error>, _> = std::panic::AssertUnwindSafe(panicking).catch_unwind().await;
        assert!(panicked.is_err());
        assert!(guard.is_valid() && is_held(&locks).await);
        assert_eq!(again(&locks).await.expect("mine"), guard.fence().get());
    });
    outcome.await.expect("free");
    assert!(!is_held(&locks).await);
}

async fn another_manager_is_another_holder(arena: Arena) {
    let (locks, other) = (arena.manager().await, arena.manager().await);
    let inner = locks.with_lock("r", async |_| again(&other).await);
    assert!(matches!(inner.await.expect("free"), Err(Error::NotAcquired { .. })));
}

async fn a_loss_ends_all_who_entered(arena: Arena) {
    let locks = arena.manager().await;
    let mut inner_went_on = false;
    let outcome = locks.lock("r").run_reentrant(async |_| {
        let inner = locks.lock("r").run_reentrant(async |guard| {
            locks.evict("r", guard.holder_id(), EvictMode::Revoke, "test").await.expect("answered");
            guard.lost().await;
            std::future::pending::<()>().await;
        });
        inner.await.expect("not reached: the outer one is cancelled as well");
        inner_went_on = true;
    });
    let outcome = tokio::time::timeout(LONG, outcome).await.expect("told");
    assert!(matches!(outcome, Err(Error::Lost { why: LossReason::Revoked, .. })), "{outcome:?}");
    assert!(!inner_went_on);
    locks.lock("r").wait_up_to(LONG).await.expect("free again").release().await.expect("answered");
}

/// The loss arrives on another thread while the outer work is polled, so the inner calls see it before the outer one.
async fn the_outer_call_is_cancelled_first(arena: Arena) {
    let locks = arena.manager().await;
    for entered_before in [true, false] {
        let mut went_on = false;
        let outcome = locks.lock("r").run_reentrant(async |guard| {
            let losing = async {
                tokio::task::yield_now().await;
                let evicted = locks.evict("r", guard.holder_id(), EvictMode::Revoke, "test").await;
                evicted.expect("answered");
                // Blocks on purpose, so that the outer call is not polled meanwhile.
                tokio::task::block_in_place(|| {
                    while guard.loss().is_none() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
            };
            if entered_before {
                let inside = locks.lock("r").run_reentrant(async |_| std::future::pending::<()>().await);
                let (_, inside) = tokio::join!(biased; losing, inside);
                went_on = true;
                inside.expect_err("lost");
            } else {
                losing.await;
                again(&locks).await.expect_err("lost");
                went_on = true;
            }
        });
        let outcome = tokio::time::timeout(LONG, outcome).await.expect("notified");
        assert!(matches!(outcome, Err(Error::Lost { why: LossReason::Revoked, .. })), "{outcome:?}");
        assert!(!went_on, "the outer work took another step (entered before: {entered_before})");
        locks.lock("r").wait_up_to(LONG).await.expect("free again").release().await.expect("answered");
    }
}

#[lock(key = "r", locks = locks, reentrant = true)]
async fn count_down(locks: &LockManager, from: u32) -> Result<Vec<u64>, Error> {
    let mut fences = vec![current_fence().expect("inside").get()];
    if from > 0 {
        fences.extend(Box::pin(count_down(locks, from - 1)).await?);
    }
    Ok(fences)
}

async fn the_attribute_enters_again_too(arena: Arena) {
    let locks = arena.manager().await;
    let fences = count_down(&locks, 3).await.expect("free");
    assert!(fences.len() == 4 && fences.windows(2).all(|pair| pair[0] == pair[1]), "{fences:?}");
    assert!(!is_held(&locks).await);
    // A function with the attribute inside a lock that was acquired without it.
    let inner = locks.with_lock("r", async |_| count_down(&locks, 0).await).await.expect("free");
    assert_eq!(inner.expect("mine").len(), 1);
}

//! `once` on every store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::bindings::{ClaimId, Retention};
use leasehold::inspect::EvictMode;
use leasehold::lease::{Invalid, Terms};
use leasehold::once::{Outcome, Started};
use leasehold::store::{BindingId, BindingKind, Change, Changed, Create, Expected, NewBinding};
use leasehold::{Error, Guard, LockManager, LockName};
use leasehold_testkit::{Arena, Kind, on_every_store};
use tokio::sync::Notify;

const SHORT: Duration = Duration::from_secs(1);

on_every_store!(
    one_runs_and_the_others_get_its_result,
    an_error_is_stored_as_well,
    an_error_that_passes_is_not_stored,
    another_payload_is_refused,
    another_payload_is_refused_also_after_a_wait,
    a_runner_that_gave_up_is_followed,
    a_paused_runner_never_stores_over_its_successor,
    a_lost_lease_cancels_the_work_and_stores_nothing,
    a_request_without_waiting_gets_an_error,
    a_result_is_kept_for_its_retention,
    work_may_take_longer_than_its_result_is_kept,
    a_result_can_be_looked_at_and_forgotten,
    bad_input_is_refused,
    a_result_that_cannot_be_stored_is_not_made_again,
    records_of_earlier_builds_are_taken_over_and_kept,
    an_earlier_build_that_is_late_costs_no_result,
    a_late_runner_takes_nothing_back,
    the_lock_is_renewed_whatever_the_terms_say,
);

async fn the_lock_is_renewed_whatever_the_terms_say(arena: Arena) {
    let locks = arena.manager().await;
    let terms = Terms::new().ttl(SHORT).renew(false).unfenced();
    let work = async |_: &Guard| tokio::time::sleep(2 * SHORT).await;
    let outcome = locks.once("long").terms(&terms).run(work).await.expect("not lost");
    assert!(outcome.fresh && outcome.stored);
}

async fn runs(locks: &LockManager, id: &str, value: u32) -> Outcome<u32> {
    locks.once(id).run(async |_| value).await.expect("done")
}

async fn one_runs_and_the_others_get_its_result(arena: Arena) {
    let managers = [arena.manager().await, arena.manager().await, arena.manager().await];
    let ran = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for task in 0..24_u32 {
        let (locks, ran) = (managers[task as usize % 3].clone(), ran.clone());
        tasks.push(tokio::spawn(async move {
            let work = async |guard: &Guard| {
                assert_eq!(ran.fetch_add(1, Ordering::SeqCst), 0, "it runs more than once");
                assert_eq!(leasehold::current_fence(), guard.try_fence());
                tokio::time::sleep(Duration::from_millis(30)).await;
                task
            };
            locks.once("job").payload("same").run(work).await.expect("done")
        }));
    }
    let mut outcomes = Vec::new();
    for task in tasks {
        outcomes.push(task.await.expect("no panic"));
    }
    let fresh: Vec<_> = outcomes.iter().filter(|outcome| outcome.fresh).collect();
    assert_eq!(fresh.len(), 1);
    assert!(outcomes.iter().all(|outcome| outcome.value == fresh[0].value && outcome.stored));
    // No lock is held, and a later caller gets the result without a lock.
    assert!(!managers[0].is_locked("once:job").await.expect("answered"));
    let late = managers[1].once("job").payload("same").run(async |_| -> u32 { unreachable!("done") }).await;
    assert!(late.is_ok_and(|late| !late.fresh && late.value == fresh[0].value));
}

async fn an_error_is_stored_as_well(arena: Arena) {
    let locks = arena.manager().await;
    let fails = async |_: &Guard| -> Result<u32, String> { Err("card refused".into()) };
    let first = locks.once("pay").run(fails).await.expect("an outcome");
    let again = locks.once("pay").run(async |_| -> Result<u32, String> { unreachable!("done") }).await;
    let again = again.expect("an outcome");
    assert_eq!((first.fresh, again.fresh), (true, false));
    assert_eq!(again.value, Err("card refused".to_owned()));
}

async fn an_error_that_passes_is_not_stored(arena: Arena) {
    let locks = arena.manager().await;
    let failed = locks.once("pay").payload("a").run_until_ok(async |_| Err::<u32, _>("busy")).await;
    assert_eq!(failed.expect("no error of ours"), Err("busy"));
    // The id can be used again, also with another payload.
    let paid = locks.once("pay").payload("b").run_until_ok(async |_| Ok::<_, &str>(7)).await;
    assert!(paid.expect("no error of ours").is_ok_and(|paid| paid.fresh && paid.value == 7));
    let again = locks.once("pay").payload("b").run_until_ok(async |_| Err::<u32, _>("busy")).await;
    assert!(again.expect("no error of ours").is_ok_and(|paid| !paid.fresh && paid.value == 7));
}

async fn another_payload_is_refused(arena: Arena) {
    let (locks, other) = (arena.manager().await, arena.manager().await);
    let Ok(Started::Run(running)) = locks.once("pay").payload(&(42, 999)).start().await else { panic!("new") };
    // While it runs: at once, not after a wait.
    let refused = other.once("pay").payload(&(42, 1)).wait_up_to(SHORT).run(async |_| 0).await;
    assert!(matches!(refused, Err(Error::OtherPayload { .. })), "{refused:?}");
    assert!(running.finish(b"999").await.expect("stored"));
    let refused = other.once("pay").payload(&(42, 1)).run(async |_| 0).await;
    let Err(error @ Error::OtherPayload { .. }) = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("\"pay\"") && !error.is_retryable(), "{error}");
    assert_eq!(other.once("pay").payload(&(42, 999)).run(async |_| 0).await.expect("done").value, 999);
    assert!(!other.is_locked("once:pay").await.expect("answered"));
}

/// Two callers with different payloads start before the work begins. The first one begins it and dies; then it is the other
/// one's turn.
async fn another_payload_is_refused_also_after_a_wait(arena: Arena) {
    let (locks, other) = (arena.manager().await, arena.manager().await);
    let turn = locks.lock("once:pay").await.expect("free");
    let waits = tokio::spawn(async move { other.once("pay").payload(&(42, 1)).run(async |_| 0).await });
    while locks.info("once:pay").await.expect("answered").waiters.is_empty() {
        tokio::task::yield_now().await;
    }
    let id = BindingId { kind: BindingKind::Results, id: LockName::new("pay").expect("a name") };
    let value = br#"{"state":"running","by":"a@b:1","at_ms":1,"fence":1,"payload":"of another"}"#;
    let keep = Retention::new(Retention::MAX).expect("a time");
    let new = NewBinding { id, claim: ClaimId::random(), keep, slot: None, value: [&value[..], b"\n"].concat() };
    assert_eq!(arena.store().await.create(&new).await.expect("answered"), Create::Created);
    turn.release().await.expect("answered");
    let refused = waits.await.expect("no panic");
    assert!(matches!(refused, Err(Error::OtherPayload { .. })), "{refused:?}");
    assert!(!locks.is_locked("once:pay").await.expect("answered"));
}

async fn a_runner_that_gave_up_is_followed(arena: Arena) {
    let (locks, other) = (arena.manager().await, arena.manager().await);
    let begun = Arc::new(Notify::new());
    let told = begun.clone();
    let dropped = tokio::spawn({
        let locks = locks.clone();
        async move {
            let forever = async |_: &Guard| -> u32 {
                told.notify_one();
                std::future::pending().await
            };
            locks.once("job").run(forever).await
        }
    });
    begun.notified().await;
    let next = tokio::spawn(async move { runs(&other, "job", 2).await });
    dropped.abort();
    assert!(dropped.await.is_err_and(|e| e.is_cancelled()));
    let next = next.await.expect("no panic");
    assert!(next.fresh && next.value == 2);
    // A panic ends it too.
    let panicking = tokio::spawn({
        let locks = locks.clone();
        async move { locks.once("other").run(async |_| -> u32 { panic!("on purpose") }).await.is_ok() }
    });
    assert!(panicking.await.is_err());
    assert!(runs(&locks, "other", 3).await.fresh);
}

async fn a_paused_runner_never_stores_over_its_successor(arena: Arena) {
    let (paused, next) = (arena.manager().await, arena.manager().await);
    for id in ["during", "after"] {
        let Ok(Started::Run(late)) = paused.once(id).start().await else { panic!("new") };
        // Its lease has ended, but it does not know that yet.
        arena.expire(&format!("once:{id}")).await;
        let Ok(Started::Run(successor)) = next.once(id).start().await else { panic!("free") };
        assert!(late.guard().is_valid());
        if id == "during" {
            let refused = late.finish(b"1").await;
            assert!(matches!(refused, Err(Error::Lost { .. })), "{refused:?}");
            assert!(next.once(id).result::<u32>().await.expect("answered").is_none(), "not done yet");
            assert!(successor.finish(b"2").await.expect("stored"));
        } else {
            assert!(successor.finish(b"2").await.expect("stored"));
            assert!(matches!(late.finish(b"1").await, Err(Error::Lost { .. })));
        }
        assert_eq!(paused.once(id).result::<u32>().await.expect("answered"), Some(2));
    }
}

async fn a_lost_lease_cancels_the_work_and_stores_nothing(arena: Arena) {
    let (locks, operator) = (arena.manager().await, arena.manager().await);
    let begun = Arc::new(Notify::new());
    let told = begun.clone();
    let work = tokio::spawn(async move {
        let forever = async |_: &Guard| -> u32 {
            told.notify_one();
            std::future::pending().await
        };
        locks.once("job").run(forever).await
    });
    begun.notified().await;
    let holder = operator.holder("once:job").await.expect("answered").expect("held");
    operator.evict("once:job", holder.id, EvictMode::Revoke, "test").await.expect("answered");
    let lost = work.await.expect("no panic");
    assert!(matches!(lost, Err(Error::Lost { .. })), "{lost:?}");
    assert!(runs(&operator, "job", 2).await.fresh);
}

async fn a_request_without_waiting_gets_an_error(arena: Arena) {
    let (locks, other) = (arena.manager().await, arena.manager().await);
    let Ok(Started::Run(running)) = locks.once("job").owner("first").start().await else { panic!("new") };
    for once in [other.once("job").no_wait(), other.once("job").wait_up_to(Duration::from_millis(50))] {
        let told = once.run(async |_| 0).await;
        let Err(Error::NotAcquired { holder: Some(holder), .. }) = told else { panic!("{told:?}") };
        assert!(holder.owner.to_string().starts_with("first"), "{}", holder.owner);
    }
    running.finish(b"5").await.expect("stored");
    let Ok(Started::Done(done)) = other.once("job").no_wait().start().await else { panic!("done") };
    assert!(done.bytes() == b"5" && done.by().starts_with("first") && done.at_ms() > 0);
}

async fn a_result_is_kept_for_its_retention(arena: Arena) {
    let locks = arena.manager().await;
    assert!(locks.once("job").keep(SHORT).run(async |_| 1).await.expect("done").fresh);
    assert!(!runs(&locks, "job", 2).await.fresh);
    tokio::time::sleep(SHORT + Duration::from_millis(50)).await;
    let anew = runs(&locks, "job", 3).await;
    assert!(anew.fresh && anew.value == 3);
}

async fn work_may_take_longer_than_its_result_is_kept(arena: Arena) {
    let locks = arena.manager().await;
    let slow = async |_: &Guard| {
        tokio::time::sleep(SHORT + Duration::from_millis(100)).await;
        1
    };
    let done = locks.once("job").keep(SHORT).run(slow).await.expect("done");
    assert!(done.fresh && done.stored);
    assert_eq!(locks.once("job").result::<u32>().await.expect("answered"), Some(1));
}

async fn a_result_can_be_looked_at_and_forgotten(arena: Arena) {
    let locks = arena.manager().await;
    assert!(locks.once("job").result::<u32>().await.expect("answered").is_none());
    assert!(!locks.once("job").forget().await.expect("answered"));
    let Ok(Started::Run(running)) = locks.once("job").start().await else { panic!("new") };
    assert!(locks.once("job").result::<u32>().await.expect("answered").is_none());
    assert!(!locks.once("job").forget().await.expect("answered"), "work under way is not touched");
    running.finish(b"1").await.expect("stored");
    assert_eq!(locks.once("job").result::<u32>().await.expect("answered"), Some(1));
    let wrong = locks.once("job").result::<String>().await;
    assert!(matches!(wrong, Err(Error::Unreadable { .. })), "{wrong:?}");
    assert!(locks.once("job").forget().await.expect("answered"));
    assert!(runs(&locks, "job", 2).await.fresh);
}

async fn bad_input_is_refused(arena: Arena) {
    let locks = arena.manager().await;
    let long = "x".repeat(508);
    for id in ["", "two\nlines", &long] {
        let refused = locks.once(id).run(async |_| 0).await;
        assert!(matches!(refused, Err(Error::Invalid(Invalid::Id { .. }))), "{refused:?}");
    }
    assert!(locks.once(&long[..507]).run(async |_| 0).await.is_ok());
    let refused = locks.once("job").keep(Duration::ZERO).run(async |_| 0).await;
    assert!(matches!(refused, Err(Error::Invalid(Invalid::Retention { .. }))), "{refused:?}");
    // All errors come before the work begins.
    assert!(runs(&locks, "job", 2).await.fresh);
}

async fn a_result_that_cannot_be_stored_is_not_made_again(arena: Arena) {
    let locks = arena.manager().await;
    let large = locks.once("large").run(async |_| "x".repeat(2 << 20)).await;
    assert!(matches!(large, Err(Error::Invalid(Invalid::Value { .. }))), "{large:?}");
    // Cannot be written as JSON.
    let odd = async |_: &Guard| Ok::<_, String>(BTreeMap::from([(vec![1], 1)]));
    let odd = locks.once("odd").run_until_ok(odd).await;
    assert!(matches!(odd, Err(Error::Invalid(Invalid::Value { .. }))), "{odd:?}");
    let Ok(Started::Run(running)) = locks.once("bytes").start().await else { panic!("new") };
    assert!(matches!(running.finish(&[0; 2 << 20]).await, Err(Error::Invalid(Invalid::Value { .. }))));
    for (id, why) in
        [("large", "at most 1048576 can be stored"), ("odd", "cannot be written as JSON"), ("bytes", "can be stored")]
    {
        let told = locks.once(id).run(async |_| -> u32 { unreachable!("it was done") }).await;
        let Err(error @ Error::ResultNotStored { .. }) = told else { panic!("{told:?}") };
        let text = error.to_string();
        assert!(text.contains(why) && text.contains(id) && text.contains("Forget") && !error.is_retryable(), "{text}");
        let looked = locks.once(id).result::<u32>().await;
        assert!(matches!(looked, Err(Error::ResultNotStored { .. })), "{looked:?}");
        assert!(locks.once(id).forget().await.expect("answered"));
        assert!(runs(&locks, id, 2).await.fresh, "once that is forgotten, it may be done again");
    }
}

/// A record of a build without fences.
fn unfenced(id: &str, state: &str, result: &str) -> NewBinding {
    NewBinding {
        id: BindingId { kind: BindingKind::Results, id: LockName::new(id).expect("a name") },
        claim: ClaimId::random(),
        keep: Retention::new(Duration::from_secs(60)).expect("a time"),
        slot: None,
        value: format!("{{\"state\":\"{state}\",\"by\":\"old@host:1\",\"at_ms\":1}}\n{result}").into_bytes(),
    }
}

async fn records_of_earlier_builds_are_taken_over_and_kept(arena: Arena) {
    let (locks, store) = (arena.manager().await, arena.store().await);
    for new in [unfenced("dead", "running", ""), unfenced("done", "done", "7")] {
        assert_eq!(store.create(&new).await, Ok(Create::Created));
    }
    assert!(runs(&locks, "dead", 2).await.fresh, "nobody is at it");
    let done = runs(&locks, "done", 2).await;
    assert!(!done.fresh && done.value == 7);
}

async fn an_earlier_build_that_is_late_costs_no_result(arena: Arena) {
    let (locks, store) = (arena.manager().await, arena.store().await);
    let Ok(Started::Run(running)) = locks.once("job").start().await else { panic!("new") };
    // It removes what it considers a dead runner's record, and records its own run.
    let old = unfenced("job", "running", "");
    let (found, _) = store.read(&old.id).await.expect("answered").expect("there");
    store.remove(&old.id, &found.claim).await.expect("answered");
    assert_eq!(store.create(&old).await, Ok(Create::Created));
    assert!(running.finish(b"7").await.expect("the lease is valid"));
    assert_eq!(locks.once("job").result::<u32>().await.expect("answered"), Some(7));
    // Its result is not stored, because the record has another claim.
    let change = Change { value: b"9".to_vec(), keep: None, give_slot_back: false };
    let late = store.change(&old.id, &Expected::Claim(old.claim), &change).await;
    assert!(matches!(late, Ok(Changed::Other(_))), "{late:?}");
}

async fn a_late_runner_takes_nothing_back(arena: Arena) {
    let (paused, next) = (arena.manager().await, arena.manager().await);
    for done in [false, true] {
        let id = format!("job-{done}");
        let Ok(Started::Run(late)) = paused.once(&id).start().await else { panic!("new") };
        arena.expire(&format!("once:{id}")).await;
        let Ok(Started::Run(successor)) = next.once(&id).start().await else { panic!("free") };
        let (_guard, late) = late.split();
        if done {
            assert!(successor.finish(b"2").await.expect("stored"));
            assert!(!late.forget().await.expect("answered"));
        } else {
            assert!(!late.forget().await.expect("answered"));
            assert!(successor.finish(b"2").await.expect("stored"));
        }
        assert_eq!(next.once(&id).result::<u32>().await.expect("answered"), Some(2));
    }
    // Its own result is not stored either.
    let Ok(Started::Run(running)) = next.once("own").start().await else { panic!("new") };
    let (guard, slot) = running.split();
    assert!(slot.store(&guard, b"3").await.expect("stored"));
    assert!(!slot.forget().await.expect("answered"));
    assert!(slot.store(&guard, b"3").await.expect("sent twice"));
    assert_eq!(next.once("own").result::<u32>().await.expect("answered"), Some(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_went_away_costs_the_record_not_the_result() {
    let arena = Arena::new(Kind::Redis).await;
    let mut options = arena.options();
    (options.request_timeout, options.outage_timeout) = (Duration::from_millis(200), Duration::from_millis(500));
    let locks = arena.manager_with(options).await;
    let work = async |_: &Guard| {
        arena.server().kill9();
        7
    };
    let done = locks.once("job").run(work).await.expect("the work was done");
    assert!(done.fresh && !done.stored && done.value == 7);
    let unknown = locks.once("job").run(async |_| 0).await;
    assert!(matches!(unknown, Err(Error::Store { .. })), "{unknown:?}");
}

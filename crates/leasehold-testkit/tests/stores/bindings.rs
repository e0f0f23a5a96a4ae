//! Bindings on every store.

use std::time::Duration;

use leasehold::bindings::{Bindings, ClaimId, Claimed, JobBinding, Reserved};
use leasehold::lease::Invalid;
use leasehold::store::{KeySpace, Namespace, VALUE_BYTES_MAX};
use leasehold::{Error, LockManager};
use leasehold_testkit::{Arena, Kind, on_every_store};

const LEASE: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_secs(1);

on_every_store!(
    the_first_creates_and_the_others_read_what_exists,
    a_binding_ends_with_its_lease,
    an_update_changes_only_what_is_there,
    only_its_own_claim_changes_or_removes_it,
    changes_at_once_are_all_made,
    a_job_is_marked_as_dispatched,
    a_slot_lasts_as_long_as_its_binding,
    a_slot_ends_with_its_lease,
    slots_at_once_are_never_more_than_there_are,
    namespaces_keep_bindings_apart,
    a_dropped_creation_leaves_nothing,
    bad_input_is_refused_before_anything_is_sent,
    what_is_there_may_be_of_another_type,
    a_value_may_be_as_large_as_allowed,
);

async fn created<T>(bindings: &Bindings<T>, id: &str, value: &T, lease: Duration) -> ClaimId
where
    T: serde::Serialize + serde::de::DeserializeOwned,
{
    match bindings.try_create(id, value, lease).await.expect("an answer") {
        Claimed::Created(claim) => claim,
        Claimed::Exists(found) => panic!("there is one: {found:?}"),
    }
}

async fn the_first_creates_and_the_others_read_what_exists(arena: Arena) {
    let (a, b) = (arena.manager().await.bindings::<u32>(), arena.manager().await.bindings::<u32>());
    assert!(a.get("r").await.expect("answered").is_none());
    let claim = created(&a, "r", &7, LEASE).await;
    match b.try_create("r", &8, LEASE).await.expect("an answer") {
        Claimed::Exists(found) => {
            assert_eq!((found.value, &found.claim, found.revision, found.lease), (7, &claim, 0, LEASE));
        }
        Claimed::Created(_) => panic!("created twice"),
    }
    let found = b.get("r").await.expect("answered").expect("there");
    let left = found.left.expect("asked for");
    assert!(found.value == 7 && left <= LEASE && left > LEASE / 2, "{left:?}");
    // `once` and locks have names of their own.
    assert!(!arena.manager().await.is_locked("r").await.expect("answered"));
}

async fn a_binding_ends_with_its_lease(arena: Arena) {
    let bindings = arena.manager().await.bindings::<u32>();
    created(&bindings, "r", &1, SHORT).await;
    tokio::time::sleep(SHORT / 2).await;
    assert!(bindings.get("r").await.expect("answered").is_some(), "half of it is left");
    tokio::time::sleep(SHORT / 2 + Duration::from_millis(50)).await;
    assert!(bindings.get("r").await.expect("answered").is_none());
    assert!(!bindings.update("r", &2, None).await.expect("answered"), "nothing there to update");
    created(&bindings, "r", &3, LEASE).await;
    assert_eq!(bindings.get("r").await.expect("answered").expect("there").value, 3);
}

async fn an_update_changes_only_what_is_there(arena: Arena) {
    let bindings = arena.manager().await.bindings::<u32>();
    assert!(!bindings.update("r", &1, LEASE).await.expect("answered"));
    assert!(bindings.get("r").await.expect("answered").is_none(), "an update creates nothing");
    let claim = created(&bindings, "r", &1, LEASE).await;
    // The end of the lease does not change, or starts again from now.
    assert!(bindings.update("r", &2, None).await.expect("answered"));
    let kept = bindings.get("r").await.expect("answered").expect("there");
    assert!((kept.value, kept.revision, kept.lease) == (2, 1, LEASE) && kept.left <= Some(LEASE));
    assert!(bindings.update("r", &3, LEASE * 10).await.expect("answered"));
    let renewed = bindings.get("r").await.expect("answered").expect("there");
    assert!((renewed.value, renewed.revision, renewed.lease) == (3, 2, LEASE * 10) && renewed.left > Some(LEASE));
    assert_eq!(renewed.claim, claim, "whoever updates it, it is its creator's");
}

async fn only_its_own_claim_changes_or_removes_it(arena: Arena) {
    let bindings = arena.manager().await.bindings::<u32>();
    let old = created(&bindings, "r", &1, SHORT).await;
    tokio::time::sleep(SHORT + Duration::from_millis(50)).await;
    let new = created(&bindings, "r", &2, LEASE).await;
    // Too late: it belongs to another claim.
    assert!(!bindings.update_claim("r", &old, &9, LEASE).await.expect("answered"));
    assert!(!bindings.remove("r", &old).await.expect("answered"));
    assert_eq!(bindings.get("r").await.expect("answered").expect("untouched").value, 2);
    assert!(bindings.update_claim("r", &new, &3, None).await.expect("answered"));
    assert_eq!(bindings.get("r").await.expect("answered").expect("there").value, 3);
    assert!(bindings.remove("r", &new).await.expect("answered"));
    assert!(!bindings.remove("r", &new).await.expect("answered"), "gone");
    created(&bindings, "r", &4, LEASE).await;
}

async fn changes_at_once_are_all_made(arena: Arena) {
    let managers = [arena.manager().await, arena.manager().await];
    created(&managers[0].bindings::<u32>(), "n", &0, LEASE).await;
    let mut tasks = Vec::new();
    for task in 0..8 {
        let bindings = managers[task % 2].bindings::<u32>();
        tasks.push(tokio::spawn(async move { bindings.modify("n", |n| *n += 1).await }));
    }
    for task in tasks {
        task.await.expect("no panic").expect("answered").expect("there");
    }
    let found = managers[0].bindings::<u32>().get("n").await.expect("answered").expect("there");
    assert_eq!((found.value, found.revision), (8, 8));
}

async fn a_job_is_marked_as_dispatched(arena: Arena) {
    let jobs = arena.manager().await.bindings::<JobBinding>();
    assert!(jobs.mark_dispatched("r").await.expect("answered").is_none());
    let claim = created(&jobs, "r", &JobBinding::new("job-1").on("node-7"), LEASE).await;
    for _ in 0..2 {
        let marked = jobs.mark_dispatched("r").await.expect("answered").expect("there");
        assert!(marked.value.dispatched && marked.value.job_id == "job-1" && marked.claim == claim);
    }
    let found = jobs.get("r").await.expect("answered").expect("there");
    assert!(found.value.dispatched && found.left <= Some(LEASE) && found.lease == LEASE);
    assert_eq!(found.value.node_id.as_deref(), Some("node-7"));
}

async fn reserve(jobs: &Bindings<JobBinding>, id: &str, slots: u32, lease: Duration) -> Reserved {
    let job = JobBinding::new(format!("job of {id}")).on("node 7");
    jobs.try_create_on_node(id, &job, slots, lease).await.expect("an answer")
}

async fn eventually_reserved(jobs: &Bindings<JobBinding>, id: &str) -> ClaimId {
    for _ in 0..1_000 {
        match reserve(jobs, id, 2, LEASE).await {
            Reserved::Created(reservation) => return reservation.keep(),
            Reserved::NodeFull => tokio::time::sleep(Duration::from_millis(5)).await,
            Reserved::Exists(found) => panic!("there is one: {found:?}"),
        }
    }
    panic!("the slot was never given back");
}

async fn a_slot_lasts_as_long_as_its_binding(arena: Arena) {
    let jobs = arena.manager().await.bindings::<JobBinding>();
    let other = arena.manager().await.bindings::<JobBinding>();
    let Reserved::Created(first) = reserve(&jobs, "a", 2, LEASE).await else { panic!("free") };
    let first = first.keep();
    let Reserved::Created(second) = reserve(&jobs, "b", 2, LEASE).await else { panic!("a slot is left") };
    // The same request takes no second slot; another request finds no free slot and is not bound.
    assert!(matches!(reserve(&other, "a", 2, LEASE).await, Reserved::Exists(_)));
    assert!(matches!(reserve(&other, "c", 2, LEASE).await, Reserved::NodeFull));
    assert!(other.get("c").await.expect("answered").is_none());
    let found = other.get("a").await.expect("answered").expect("there");
    assert_eq!(found.slot_on.as_ref().map(leasehold::LockName::as_str), Some("node 7"));
    // The creation of b's job failed.
    drop(second);
    let third = eventually_reserved(&other, "c").await;
    assert!(other.get("b").await.expect("answered").is_none(), "binding and slot go together");
    assert!(matches!(reserve(&jobs, "b", 2, LEASE).await, Reserved::NodeFull));
    // Removed; or finished, while the binding still has the job.
    assert!(jobs.remove("a", &first).await.expect("answered"));
    let fourth = eventually_reserved(&jobs, "b").await;
    jobs.mark_dispatched("b").await.expect("answered").expect("there");
    assert!(matches!(reserve(&jobs, "d", 2, LEASE).await, Reserved::NodeFull), "a change keeps the slot");
    assert!(!jobs.give_slot_back("b", &third).await.expect("answered"), "not that claim's");
    assert!(jobs.give_slot_back("b", &fourth).await.expect("answered"));
    let found = jobs.get("b").await.expect("answered").expect("there still");
    assert!(found.slot_on.is_none() && found.value.dispatched);
    eventually_reserved(&jobs, "d").await;
    // Another node has slots of its own.
    let job = JobBinding::new("e").on("node 8");
    let elsewhere = jobs.try_create_on_node("e", &job, 1, LEASE).await.expect("an answer");
    assert!(matches!(elsewhere, Reserved::Created(_)));
}

async fn a_slot_ends_with_its_lease(arena: Arena) {
    let jobs = arena.manager().await.bindings::<JobBinding>();
    let Reserved::Created(crashed) = reserve(&jobs, "a", 2, SHORT).await else { panic!("free") };
    crashed.keep();
    let Reserved::Created(renewed) = reserve(&jobs, "b", 2, SHORT).await else { panic!("free") };
    renewed.keep();
    let job = jobs.get("b").await.expect("answered").expect("there").value;
    assert!(jobs.update("b", &job, LEASE).await.expect("answered"), "its slot is renewed with it");
    assert!(matches!(reserve(&jobs, "c", 2, LEASE).await, Reserved::NodeFull));
    tokio::time::sleep(SHORT + Duration::from_millis(50)).await;
    let Reserved::Created(next) = reserve(&jobs, "c", 2, LEASE).await else { panic!("a's slot is over") };
    next.keep();
    assert!(matches!(reserve(&jobs, "d", 2, LEASE).await, Reserved::NodeFull), "b's is not");
}

async fn slots_at_once_are_never_more_than_there_are(arena: Arena) {
    let managers = [arena.manager().await, arena.manager().await];
    let mut tasks = Vec::new();
    for task in 0..20_usize {
        let jobs = managers[task % 2].bindings::<JobBinding>();
        tasks.push(tokio::spawn(async move {
            match reserve(&jobs, &format!("r{task}"), 3, LEASE).await {
                Reserved::Created(reservation) => drop(reservation.keep()),
                Reserved::NodeFull => return false,
                Reserved::Exists(found) => panic!("ids differ: {found:?}"),
            }
            true
        }));
    }
    let mut got = 0;
    for task in tasks {
        got += usize::from(task.await.expect("no panic"));
    }
    assert_eq!(got, 3);
}

async fn namespaces_keep_bindings_apart(arena: Arena) {
    let manager = async |namespace: &str| -> LockManager {
        let mut options = arena.options();
        options.keys = KeySpace::new(Namespace::new(namespace).expect("valid"), vec![]).expect("valid");
        arena.manager_with(options).await
    };
    let (a, b, none) = (manager("a").await, manager("b").await, manager("").await);
    for (value, locks) in [(1, &a), (2, &b), (3, &none)] {
        created(&locks.bindings::<u32>(), "r", &value, LEASE).await;
        created(&locks.bindings::<u32>(), "a:r", &(value + 10), LEASE).await;
    }
    for (value, locks) in [(1, &a), (2, &b), (3, &none)] {
        let found = locks.bindings::<u32>().get("r").await.expect("answered").expect("there");
        assert_eq!(found.value, value);
        let jobs = locks.bindings::<JobBinding>();
        let Reserved::Created(slot) = reserve(&jobs, "j", 1, LEASE).await else { panic!("a node of its own") };
        slot.keep();
    }
}

async fn a_dropped_creation_leaves_nothing(arena: Arena) {
    let locks = arena.manager().await;
    let bindings = locks.bindings::<u32>();
    for n in 0..30 {
        let creating = bindings.try_create(format!("r{n}"), &n, LEASE);
        // Sent and dropped before the reply (the memory store replies at once).
        if let Ok(answer) = tokio::time::timeout(Duration::ZERO, creating).await
            && let Claimed::Created(claim) = answer.expect("an answer")
        {
            assert!(bindings.remove(format!("r{n}"), &claim).await.expect("answered"));
        }
    }
    for n in 0..30 {
        let mut left = 1_000;
        while bindings.get(format!("r{n}")).await.expect("answered").is_some() {
            left -= 1;
            assert!(left > 0, "r{n} was left behind");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    // None appears later.
    locks.shutdown().await;
    let later = arena.manager().await.bindings::<u32>();
    for n in 0..30 {
        assert!(later.get(format!("r{n}")).await.expect("answered").is_none(), "r{n}");
    }
}

async fn bad_input_is_refused_before_anything_is_sent(arena: Arena) {
    let locks = arena.manager().await;
    let bindings = locks.bindings::<String>();
    let long = "x".repeat(513);
    for id in ["", "two\nlines", &long] {
        let refused = bindings.try_create(id, &String::new(), LEASE).await;
        let Err(Error::Invalid(Invalid::Id { what: "request id", .. })) = refused else { panic!("{refused:?}") };
        assert!(bindings.get(id).await.is_err());
    }
    for lease in [Duration::ZERO, Duration::from_millis(999), Duration::from_secs(401 * 86_400), Duration::MAX] {
        let refused = bindings.try_create("r", &String::new(), lease).await;
        assert!(matches!(refused, Err(Error::Invalid(Invalid::Retention { .. }))), "{refused:?}");
    }
    let too_large = "x".repeat(VALUE_BYTES_MAX - 1);
    let refused = bindings.try_create("r", &too_large, LEASE).await;
    let Err(Error::Invalid(invalid @ Invalid::Value { .. })) = refused else { panic!("{refused:?}") };
    let text = invalid.to_string();
    assert!(text.contains("1048577 bytes") && text.contains("1048576") && text.len() < 200, "{text}");
    let jobs = locks.bindings::<JobBinding>();
    assert!(jobs.try_create_on_node("r", &JobBinding::new("j"), 1, LEASE).await.is_err(), "no node");
    assert!(jobs.try_create_on_node("r", &JobBinding::new("j").on("n"), 0, LEASE).await.is_err(), "no slots");
    assert!(bindings.get("r").await.expect("answered").is_none());
}

async fn what_is_there_may_be_of_another_type(arena: Arena) {
    let locks = arena.manager().await;
    created(&locks.bindings::<String>(), "r", &"the customer's name".into(), LEASE).await;
    let other = locks.bindings::<u32>().try_create("r", &1, LEASE).await;
    let Err(error @ Error::Unreadable { .. }) = other else { panic!("{other:?}") };
    assert!(error.name().is_some_and(|name| name.as_str() == "r") && !error.is_retryable());
    let found = locks.bindings::<String>().get("r").await.expect("answered").expect("there");
    assert!(!format!("{found:?}").contains("customer"), "values are not shown");
}

async fn a_value_may_be_as_large_as_allowed(arena: Arena) {
    let locks = arena.manager().await;
    let bindings = locks.bindings::<String>();
    let large = "x".repeat(VALUE_BYTES_MAX - 2);
    for n in 0..3 {
        created(&bindings, &format!("r{n}"), &large, LEASE).await;
    }
    assert!(bindings.update("r0", &large, None).await.expect("answered"));
    let found = arena.manager().await.bindings::<String>().get("r0").await.expect("answered").expect("there");
    assert!(found.value == large && found.revision == 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_away_is_an_error() {
    let arena = Arena::new(Kind::Redis).await;
    let mut options = arena.options();
    options.request_timeout = Duration::from_millis(300);
    let locks = arena.manager_with(options).await;
    let bindings = locks.bindings::<u32>();
    arena.server().kill9();
    let unknown = bindings.try_create("r", &1, LEASE).await;
    let Err(error @ Error::Store { .. }) = unknown else { panic!("{unknown:?}") };
    assert!(error.is_retryable() && error.to_string().starts_with("`create` of \"r\" on redis://"), "{error}");
    assert!(matches!(bindings.get("r").await, Err(Error::Store { .. })));
}

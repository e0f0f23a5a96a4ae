//! Evictions.

use leasehold::inspect::{EvictMode, Evicted, FinishRequest};
use leasehold::store::{Release, Renewed};

use super::*;

pub(crate) async fn a_revoked_holder_cannot_renew_and_hands_on(world: &impl World) {
    let (here, operator) = (world.open().await, world.open().await);
    let mut pushes = here.pushes();
    let (holder, waiter) = (claim("a"), claim("a"));
    let fence = takes(&*here, &holder).await.fence;
    let id = holder.token.holder_id();
    let evicted = operator.evict(&holder.name, id, EvictMode::Revoke).await;
    assert!(matches!(evicted, Ok(Evicted::Done(found)) if found.id == id));
    assert_eq!(next(&mut pushes).await, Push::Revoked { token: holder.token.clone() });
    // A new request must not turn it into an ordinary holder.
    queues(&*here, &waiter).await;
    assert_eq!(here.renew(&[renewal(&holder, fence)]).await, [Renewed::Revoked]);
    assert_eq!(here.try_acquire(&holder).await, Ok(Try::Revoked));
    let seen = operator.holder(&holder.name).await.expect("an answer").expect("a holder");
    assert!(seen.id == id && seen.revoked);
    silence(&mut pushes).await;
    assert_eq!(here.release(&holder.name, &holder.token).await, Ok(Release::Released));
    is_granted(&mut pushes, &waiter).await;
}

pub(crate) async fn a_revoked_waiting_room_learns_it_with_its_next_request(world: &impl World) {
    let store = world.open().await;
    let holder = claim("a");
    acquires(&*store, &holder).await;
    let revoked = store.evict(&holder.name, holder.token.holder_id(), EvictMode::Revoke).await;
    assert!(matches!(revoked, Ok(Evicted::Done(_))));
    assert_eq!(store.acquire(&holder, None).await, Ok(Acquire::Revoked));
    assert_eq!(store.release(&holder.name, &holder.token).await, Ok(Release::Released));
    assert_eq!(store.holder(&holder.name).await, Ok(None));
}

pub(crate) async fn force_hands_on_at_once(world: &impl World) {
    let (here, there) = (world.open().await, world.open().await);
    let (mut told_here, mut told_there) = (here.pushes(), there.pushes());
    let (holder, waiter) = (claim("a"), claim("a"));
    let fence = takes(&*here, &holder).await.fence;
    queues(&*there, &waiter).await;
    let forced = there.evict(&holder.name, holder.token.holder_id(), EvictMode::Force).await;
    assert!(matches!(forced, Ok(Evicted::Done(found)) if found.owner == holder.owner));
    assert_eq!(next(&mut told_here).await, Push::Revoked { token: holder.token.clone() });
    assert!(is_granted(&mut told_there, &waiter).await.fence > fence);
    assert_eq!(here.renew(&[renewal(&holder, fence)]).await, [Renewed::Lost]);
    let forced = there.evict(&waiter.name, waiter.token.holder_id(), EvictMode::Force).await;
    assert!(matches!(forced, Ok(Evicted::Done(_))));
    assert_eq!(here.holder(&holder.name).await, Ok(None));
}

pub(crate) async fn an_old_holder_is_not_evicted_again(world: &impl World) {
    let store = world.open().await;
    let (old, new) = (claim("a"), claim("a"));
    takes(&*store, &old).await;
    store.release(&old.name, &old.token).await.expect("an answer");
    let fence = takes(&*store, &new).await.fence;
    for mode in [EvictMode::Revoke, EvictMode::Force] {
        let evicted = store.evict(&old.name, old.token.holder_id(), mode).await;
        assert!(matches!(evicted, Ok(Evicted::ChangedHands(found)) if found.id == new.token.holder_id()));
    }
    let asked = store.ask_to_finish(&old.name, old.token.holder_id(), "why not").await;
    assert!(matches!(asked, Ok(FinishRequest::ChangedHands(found)) if found.id == new.token.holder_id()));
    assert_eq!(store.renew(&[renewal(&new, fence)]).await, [Renewed::Renewed]);
}

pub(crate) async fn a_free_lock_is_not_evicted(world: &impl World) {
    let store = world.open().await;
    let (lock, id) = (name("a"), claim("a").token.holder_id());
    assert_eq!(store.evict(&lock, id, EvictMode::Revoke).await, Ok(Evicted::Free));
    assert_eq!(store.evict(&lock, id, EvictMode::Force).await, Ok(Evicted::Free));
    assert_eq!(store.ask_to_finish(&lock, id, "why not").await, Ok(FinishRequest::Free));
}

pub(crate) async fn a_holder_is_asked_to_finish(world: &impl World) {
    let (here, operator) = (world.open().await, world.open().await);
    let mut pushes = here.pushes();
    let holder = claim("a");
    let fence = takes(&*here, &holder).await.fence;
    let reason = "a new release goes out";
    let asked = operator.ask_to_finish(&holder.name, holder.token.holder_id(), reason).await;
    assert!(matches!(asked, Ok(FinishRequest::Delivered(found)) if found.id == holder.token.holder_id()));
    let told = Push::Finish { token: holder.token.clone(), reason: reason.into() };
    assert_eq!(next(&mut pushes).await, told);
    assert_eq!(here.renew(&[renewal(&holder, fence)]).await, [Renewed::Renewed], "only asked");
}

pub(crate) async fn a_request_to_a_holder_that_does_not_listen_is_undeliverable(world: &impl World) {
    let (gone, operator) = (world.open().await, world.open().await);
    let (dead, quiet) = (claim("a"), AcquireRequest { listens: false, ..claim("b") });
    takes(&*gone, &dead).await;
    takes(&*gone, &quiet).await;
    world.crash(gone).await;
    for holder in [dead, quiet] {
        let asked = operator.ask_to_finish(&holder.name, holder.token.holder_id(), "?").await;
        if world.sees_death() && holder.listens {
            assert_eq!(asked, Ok(FinishRequest::Free), "a dead holder's lock is free");
            continue;
        }
        assert!(matches!(asked, Ok(FinishRequest::Undeliverable(found)) if found.id == holder.token.holder_id()));
    }
}

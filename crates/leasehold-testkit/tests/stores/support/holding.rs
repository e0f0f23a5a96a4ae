//! Acquiring, renewing and releasing.

use leasehold::Owner;
use leasehold::inspect::{EvictMode, Holder};
use leasehold::store::{AcquireRequest, Release, Renewal, Renewed};

use super::*;

pub(crate) async fn a_free_lock_is_granted_and_then_held(world: &impl World) {
    let (here, there) = (world.open().await, world.open().await);
    let (mine, theirs) = (claim("a"), claim("a"));
    assert_eq!(here.holder(&mine.name).await, Ok(None));
    let grant = takes(&*here, &mine).await;
    assert!(grant.fence.is_some());
    assert_eq!(grant.lasts, LONG);
    let holder = is_held(&*there, &theirs).await.expect("known");
    assert_eq!(holder.id, mine.token.holder_id());
    assert_eq!(holder.owner, mine.owner);
    assert!(!holder.foreign && !holder.revoked && holder.listens);
    let seen = there.holder(&mine.name).await.expect("an answer").expect("a holder");
    assert_eq!((seen.id, seen.ttl), (mine.token.holder_id(), Some(LONG)));
    let left = seen.ttl_left.expect("an end");
    assert!(left <= LONG && left > LONG - Duration::from_secs(5), "{left:?}");
    assert_eq!(here.release(&mine.name, &mine.token).await, Ok(Release::Released));
    takes(&*there, &theirs).await;
}

pub(crate) async fn only_its_token_releases_a_lock(world: &impl World) {
    let store = world.open().await;
    let (mine, other) = (claim("a"), claim("a"));
    assert_eq!(store.release(&mine.name, &mine.token).await, Ok(Release::NotOwner), "free");
    takes(&*store, &mine).await;
    assert_eq!(store.release(&other.name, &other.token).await, Ok(Release::NotOwner));
    assert_eq!(store.release_emergency(&other.name, &other.token).await, Ok(Release::NotOwner));
    is_held(&*store, &other).await;
}

pub(crate) async fn fences_rise_over_every_way_to_a_grant(world: &impl World) {
    let (here, there) = (world.open().await, world.open().await);
    let mut pushes = there.pushes();
    let mut last = 0;
    let mut rises = |grant: Grant| {
        let fence = grant.fence.expect("fenced").get();
        assert!(fence > last, "{fence} after {last}");
        last = fence;
    };
    for _ in 0..3 {
        let (by_try, by_push, by_acquire) = (claim("a"), claim("a"), claim("a"));
        rises(takes(&*here, &by_try).await);
        queues(&*there, &by_push).await;
        here.release(&by_try.name, &by_try.token).await.expect("an answer");
        rises(is_granted(&mut pushes, &by_push).await);
        world.expire(&by_push.name).await;
        rises(acquires(&*here, &by_acquire).await);
        here.release(&by_acquire.name, &by_acquire.token).await.expect("an answer");
    }
}

pub(crate) async fn an_unfenced_grant_has_no_fence(world: &impl World) {
    let store = world.open().await;
    let mine = AcquireRequest { fenced: false, ..claim("a") };
    assert_eq!(takes(&*store, &mine).await.fence, None);
    assert_eq!(takes(&*store, &mine).await.fence, None, "sent twice");
    is_held(&*store, &claim("a")).await;
    assert_eq!(store.renew(&[renewal(&mine, None)]).await, [Renewed::Renewed]);
    assert_eq!(store.release(&mine.name, &mine.token).await, Ok(Release::Released));
    assert_eq!(acquires(&*store, &mine).await.fence, None);
}

pub(crate) async fn a_try_sent_twice_is_granted_twice(world: &impl World) {
    let store = world.open().await;
    let mine = claim("a");
    let first = takes(&*store, &mine).await;
    let second = takes(&*store, &mine).await;
    assert!(second.fence >= first.fence && second.asked_at >= first.asked_at);
    // The fence of the later reply counts.
    assert_eq!(store.renew(&[renewal(&mine, second.fence)]).await, [Renewed::Renewed]);
}

pub(crate) async fn an_acquire_sent_twice_keeps_its_ticket(world: &impl World) {
    let store = world.open().await;
    let (holder, first, second) = (claim("a"), claim("a"), claim("a"));
    let granted = acquires(&*store, &holder).await;
    assert_eq!(acquires(&*store, &holder).await.fence, granted.fence);
    let place = queues(&*store, &first).await;
    queues(&*store, &second).await;
    let again = queues(&*store, &first).await;
    assert_eq!((again.ticket, again.position), (place.ticket, 0));
    assert_eq!(again.holder.expect("a holder").id, holder.token.holder_id());
    // After a reconnect the queue may be gone, but the ticket is still valid.
    store.leave(&first).await.expect("an answer");
    let kept = store.acquire(&first, Some(place.ticket)).await;
    assert!(matches!(kept, Ok(Acquire::Queued(p)) if p.ticket == place.ticket && p.position == 0));
}

pub(crate) async fn a_release_sent_twice_frees_once(world: &impl World) {
    let store = world.open().await;
    let (mine, next) = (claim("a"), claim("a"));
    takes(&*store, &mine).await;
    assert_eq!(store.release(&mine.name, &mine.token).await, Ok(Release::Released));
    takes(&*store, &next).await;
    assert_eq!(store.release(&mine.name, &mine.token).await, Ok(Release::NotOwner));
    is_held(&*store, &claim("a")).await;
}

pub(crate) async fn late_calls_never_touch_a_successor(world: &impl World) {
    let store = world.open().await;
    let (late, successor) = (claim("a"), claim("a"));
    let grant = takes(&*store, &late).await;
    world.expire(&late.name).await;
    assert_eq!(store.renew(&[renewal(&late, grant.fence)]).await, [Renewed::Lost], "never re-created");
    assert_eq!(store.holder(&late.name).await, Ok(None));
    takes(&*store, &successor).await;
    let before = store.holder(&late.name).await.expect("an answer").expect("a holder");
    assert_eq!(store.renew(&[renewal(&late, grant.fence)]).await, [Renewed::Lost]);
    assert_eq!(store.release(&late.name, &late.token).await, Ok(Release::NotOwner));
    assert_eq!(store.release_emergency(&late.name, &late.token).await, Ok(Release::NotOwner));
    store.leave(&late).await.expect("an answer");
    let after = store.holder(&late.name).await.expect("an answer").expect("a holder");
    assert_eq!((after.id, after.revoked, after.owner), (before.id, false, before.owner));
}

pub(crate) async fn a_renewal_with_another_fence_is_lost(world: &impl World) {
    let store = world.open().await;
    let mine = claim("a");
    let old = acquires(&*store, &mine).await.fence;
    world.expire(&mine.name).await;
    let new = acquires(&*store, &mine).await.fence;
    assert!(new > old);
    assert_eq!(store.renew(&[renewal(&mine, old)]).await, [Renewed::Lost]);
    assert_eq!(store.renew(&[renewal(&mine, new)]).await, [Renewed::Renewed]);
}

pub(crate) async fn a_renewal_can_rewrite_ttl_and_owner(world: &impl World) {
    let store = world.open().await;
    let mine = claim("a");
    let fence = takes(&*store, &mine).await.fence;
    let owner = Owner::named("the task that got it").expect("an owner");
    let longer = ttl(LONG * 2);
    let extend = Renewal { ttl: longer, rewrite: Some(owner.clone()), ..renewal(&mine, fence) };
    assert_eq!(store.renew(&[extend]).await, [Renewed::Renewed]);
    let holder = store.holder(&mine.name).await.expect("an answer").expect("a holder");
    assert_eq!((holder.owner, holder.fence, holder.ttl), (owner, fence, Some(longer.duration())));
    assert!(holder.ttl_left.expect("an end") > LONG);
    assert_eq!(holder.id, mine.token.holder_id());
}

pub(crate) async fn a_lease_can_be_handed_to_another_token(world: &impl World) {
    let store = world.open().await;
    let (mine, theirs) = (claim("a"), claim("a"));
    let fence = acquires(&*store, &mine).await.fence;
    let owner = Owner::named("whoever asked").expect("an owner");
    let hand = |to: &AcquireRequest| Renewal {
        rewrite: Some(owner.clone()),
        hand_to: Some(to.token.clone()),
        ..renewal(&mine, fence)
    };
    assert_eq!(store.renew(&[hand(&theirs)]).await, [Renewed::Renewed]);
    let holder = store.holder(&mine.name).await.expect("an answer").expect("a holder");
    assert_eq!((holder.id, holder.fence, holder.owner), (theirs.token.holder_id(), fence, owner.clone()));
    assert!(!holder.listens, "it belongs to no process");
    // Sent again, it finds its own change; the old token is not used any more.
    assert_eq!(store.renew(&[hand(&theirs)]).await, [Renewed::Renewed]);
    assert_eq!(store.renew(&[hand(&claim("a")), renewal(&mine, fence)]).await, [Renewed::Lost, Renewed::Lost]);
    assert_eq!(store.release(&mine.name, &mine.token).await, Ok(Release::NotOwner));
    store.leave(&mine).await.expect("an answer");
    assert_eq!(store.renew(&[renewal(&theirs, fence)]).await, [Renewed::Renewed]);
    // A new grant to that token is another lease, which a late copy must not change.
    assert_eq!(store.release(&theirs.name, &theirs.token).await, Ok(Release::Released));
    assert_eq!(store.renew(&[hand(&theirs)]).await, [Renewed::Lost], "never re-created");
    let anew = acquires(&*store, &theirs).await.fence;
    assert_eq!(store.renew(&[hand(&theirs)]).await, [Renewed::Lost]);
    assert!(store.holder(&mine.name).await.expect("an answer").expect("a holder").listens);
    // A revoked lease is not handed on.
    store.evict(&mine.name, theirs.token.holder_id(), EvictMode::Revoke).await.expect("an answer");
    let revoked = Renewal { hand_to: Some(mine.token.clone()), ..renewal(&theirs, anew) };
    assert_eq!(store.renew(&[revoked]).await, [Renewed::Revoked]);
}

pub(crate) async fn a_renewal_never_shortens(world: &impl World) {
    let store = world.open().await;
    let mine = claim("a");
    let fence = takes(&*store, &mine).await.fence;
    let shorter = Renewal { ttl: ttl(Duration::from_secs(1)), ..renewal(&mine, fence) };
    assert_eq!(store.renew(&[shorter]).await, [Renewed::Renewed]);
    let holder = store.holder(&mine.name).await.expect("an answer").expect("a holder");
    assert!(holder.ttl_left.expect("an end") > LONG / 2);
    assert_eq!(holder.ttl, Some(LONG));
}

pub(crate) async fn a_check_reports_the_holder_and_changes_nothing(world: &impl World) {
    let store = world.open().await;
    let (mine, queued) = (claim("a"), claim("b"));
    let fence = takes(&*store, &mine).await.fence;
    let owner = Owner::named("somebody else").expect("an owner");
    let check = |claim: &AcquireRequest, fence| Renewal {
        prolong: false,
        ttl: ttl(LONG * 2),
        rewrite: Some(owner.clone()),
        hand_to: Some(queued.token.clone()),
        ..renewal(claim, fence)
    };
    let before = store.holder(&mine.name).await.expect("an answer").expect("a holder");
    assert_eq!(store.renew(&[check(&mine, fence), check(&mine, None)]).await, [Renewed::Renewed, Renewed::Renewed]);
    let after = store.holder(&mine.name).await.expect("an answer").expect("a holder");
    assert!(after.ttl_left <= before.ttl_left, "not prolonged");
    assert_eq!(Holder { ttl_left: None, ..after }, Holder { ttl_left: None, ..before });
    // A free lock, another holder's, and one with a newer grant.
    assert_eq!(
        store.renew(&[check(&claim("nobody"), None), check(&claim("a"), fence)]).await,
        [Renewed::Lost, Renewed::Lost]
    );
    assert_eq!(store.release(&mine.name, &mine.token).await, Ok(Release::Released));
    let anew = acquires(&*store, &mine).await.fence;
    assert_eq!(store.renew(&[check(&mine, fence), check(&mine, anew)]).await, [Renewed::Lost, Renewed::Renewed]);
    store.evict(&mine.name, mine.token.holder_id(), EvictMode::Revoke).await.expect("an answer");
    assert_eq!(store.renew(&[check(&mine, anew)]).await, [Renewed::Revoked]);
    world.expire(&mine.name).await;
    assert_eq!(store.renew(&[check(&mine, anew)]).await, [Renewed::Lost]);
}

pub(crate) async fn many_renewals_are_answered_in_order(world: &impl World) {
    let store = world.open().await;
    let mut renewals = Vec::new();
    for i in 0..50 {
        let mine = claim(&format!("many:{i}"));
        // Every third was never acquired.
        let fence = if i % 3 == 0 { None } else { takes(&*store, &mine).await.fence };
        renewals.push(renewal(&mine, fence));
    }
    let answers = store.renew(&renewals).await;
    assert_eq!(answers.len(), 50);
    for (i, answer) in answers.iter().enumerate() {
        assert_eq!(*answer, if i % 3 == 0 { Renewed::Lost } else { Renewed::Renewed }, "{i}");
    }
    assert_eq!(store.renew(&[]).await, []);
}

//! Waiting in the queue.

use leasehold::store::{Left, Release, Renewed};

use super::*;

async fn lets_go(store: &dyn Store, held: &AcquireRequest) {
    assert_eq!(store.release(&held.name, &held.token).await, Ok(Release::Released));
}

pub(crate) async fn waiters_are_served_in_order(world: &impl World) {
    let stores = [world.open().await, world.open().await, world.open().await];
    let mut pushes = [stores[0].pushes(), stores[1].pushes(), stores[2].pushes()];
    let first = claim("a");
    takes(&*stores[0], &first).await;
    let mut line = Vec::new();
    for i in 0..6 {
        let waiter = claim("a");
        assert_eq!(queues(&*stores[i % 3], &waiter).await.position, i);
        line.push(waiter);
    }
    lets_go(&*stores[0], &first).await;
    let mut fence = None;
    for (i, waiter) in line.iter().enumerate() {
        let grant = loop {
            match next(&mut pushes[i % 3]).await {
                Push::LookAgain { .. } => {}
                Push::Granted { token, grant } if token == waiter.token => break grant,
                other => panic!("{i} was told {other:?}"),
            }
        };
        assert!(grant.fence > fence, "{:?} after {fence:?}", grant.fence);
        fence = grant.fence;
        assert!(grant.lasts <= Duration::from_secs(2), "provisional: {:?}", grant.lasts);
        let store = &*stores[i % 3];
        assert_eq!(store.renew(&[renewal(waiter, grant.fence)]).await, [Renewed::Renewed]);
        let holder = store.holder(&waiter.name).await.expect("an answer").expect("a holder");
        assert!(holder.id == waiter.token.holder_id() && holder.ttl_left > Some(LONG / 2));
        lets_go(store, waiter).await;
    }
    assert_eq!(stores[0].holder(&first.name).await, Ok(None));
    assert_eq!(stores[0].queue(&first.name).await, Ok(vec![]));
}

pub(crate) async fn the_next_waiter_is_asked_to_look_again(world: &impl World) {
    let store = world.open().await;
    let mut pushes = store.pushes();
    let (holder, first, second) = (claim("a"), claim("a"), claim("a"));
    takes(&*store, &holder).await;
    queues(&*store, &first).await;
    queues(&*store, &second).await;
    lets_go(&*store, &holder).await;
    is_granted(&mut pushes, &first).await;
    let after = Duration::from_secs(2);
    assert_eq!(next(&mut pushes).await, Push::LookAgain { token: second.token.clone(), after });
}

pub(crate) async fn a_dead_waiter_is_passed_over(world: &impl World) {
    let (here, doomed, live) = (world.open().await, world.open().await, world.open().await);
    let mut pushes = live.pushes();
    let (holder, dead, waiter) = (claim("a"), claim("a"), claim("a"));
    takes(&*here, &holder).await;
    queues(&*doomed, &dead).await;
    queues(&*live, &waiter).await;
    world.crash(doomed).await;
    lets_go(&*here, &holder).await;
    is_granted(&mut pushes, &waiter).await;
    assert_eq!(here.queue(&holder.name).await, Ok(vec![]));
}

pub(crate) async fn hundreds_of_dead_waiters_are_passed_over(world: &impl World) {
    let (here, doomed, live) = (world.open().await, world.open().await, world.open().await);
    let mut pushes = live.pushes();
    let (holder, waiter) = (claim("a"), claim("a"));
    takes(&*here, &holder).await;
    for _ in 0..450 {
        queues(&*doomed, &claim("a")).await;
    }
    assert_eq!(queues(&*live, &waiter).await.position, 450);
    world.crash(doomed).await;
    lets_go(&*here, &holder).await;
    loop {
        match next(&mut pushes).await {
            Push::LookAgain { .. } => {}
            Push::Granted { token, .. } => break assert_eq!(token, waiter.token),
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) async fn a_waiter_leaves_the_queue(world: &impl World) {
    let store = world.open().await;
    let mut pushes = store.pushes();
    let (holder, first, second) = (claim("a"), claim("a"), claim("a"));
    takes(&*store, &holder).await;
    queues(&*store, &first).await;
    queues(&*store, &second).await;
    assert_eq!(store.leave(&first).await, Ok(Left::WasWaiting));
    assert_eq!(store.leave(&first).await, Ok(Left::WasWaiting), "sent twice");
    lets_go(&*store, &holder).await;
    is_granted(&mut pushes, &second).await;
    silence(&mut pushes).await;
}

pub(crate) async fn a_waiter_leaves_what_it_was_granted(world: &impl World) {
    let store = world.open().await;
    let mut pushes = store.pushes();
    let (holder, first, second) = (claim("a"), claim("a"), claim("a"));
    takes(&*store, &holder).await;
    queues(&*store, &first).await;
    queues(&*store, &second).await;
    lets_go(&*store, &holder).await;
    is_granted(&mut pushes, &first).await;
    assert_eq!(store.leave(&first).await, Ok(Left::WasGranted));
    assert!(matches!(next(&mut pushes).await, Push::LookAgain { .. }));
    is_granted(&mut pushes, &second).await;
    assert_eq!(store.leave(&second).await, Ok(Left::WasGranted));
    assert_eq!(store.holder(&holder.name).await, Ok(None));
}

pub(crate) async fn a_lost_push_is_found_by_the_next_request(world: &impl World) {
    let store = world.open().await;
    let mut pushes = store.pushes();
    let (holder, waiter) = (claim("a"), claim("a"));
    takes(&*store, &holder).await;
    queues(&*store, &waiter).await;
    lets_go(&*store, &holder).await;
    let pushed = is_granted(&mut pushes, &waiter).await;
    // As if the push had not come: the reply is the same grant with its full ttl.
    let asked = acquires(&*store, &waiter).await;
    assert_eq!((asked.fence, asked.lasts), (pushed.fence, LONG));
    let holder = store.holder(&waiter.name).await.expect("an answer").expect("a holder");
    assert!(holder.ttl_left > Some(LONG / 2));
}

pub(crate) async fn a_try_yields_to_waiters(world: &impl World) {
    let (here, there) = (world.open().await, world.open().await);
    let mut pushes = here.pushes();
    let (holder, waiter, passer_by) = (claim("a"), claim("a"), claim("a"));
    takes(&*there, &holder).await;
    queues(&*here, &waiter).await;
    world.expire(&holder.name).await;
    let found = is_held(&*there, &passer_by).await.expect("known");
    assert_eq!(found.id, waiter.token.holder_id());
    is_granted(&mut pushes, &waiter).await;
}

pub(crate) async fn whoever_comes_by_serves_the_first(world: &impl World) {
    let (here, there) = (world.open().await, world.open().await);
    let mut pushes = here.pushes();
    let (holder, first, second) = (claim("a"), claim("a"), claim("a"));
    takes(&*there, &holder).await;
    queues(&*here, &first).await;
    world.expire(&holder.name).await;
    let place = queues(&*there, &second).await;
    assert_eq!(place.holder.expect("a holder").id, first.token.holder_id());
    assert_eq!(place.position, 0);
    is_granted(&mut pushes, &first).await;
}

pub(crate) async fn a_polling_waiter_is_served_if_it_polled_lately(world: &impl World) {
    let store = world.open().await;
    let mut pushes = store.pushes();
    let (holder, poller) = (claim("a"), AcquireRequest { listens: false, ..claim("a") });
    takes(&*store, &holder).await;
    queues(&*store, &poller).await;
    lets_go(&*store, &holder).await;
    let held = store.holder(&holder.name).await.expect("an answer").expect("a holder");
    assert_eq!(held.id, poller.token.holder_id());
    assert!(!held.listens && held.ttl_left <= Some(Duration::from_secs(2)));
    acquires(&*store, &poller).await;
    silence(&mut pushes).await;
}

pub(crate) async fn a_polling_waiter_that_stopped_is_passed_over(world: &impl World) {
    let store = world.open().await;
    let mut pushes = store.pushes();
    let (holder, poller, waiter) = (claim("a"), AcquireRequest { listens: false, ..claim("a") }, claim("a"));
    takes(&*store, &holder).await;
    queues(&*store, &poller).await;
    queues(&*store, &waiter).await;
    tokio::time::sleep(Duration::from_millis(3_100)).await;
    lets_go(&*store, &holder).await;
    is_granted(&mut pushes, &waiter).await;
}

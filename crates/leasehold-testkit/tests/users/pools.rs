//! `Pool` on every store. The tests with several processes are in `pools_processes`.

use std::collections::{HashMap, VecDeque};
use std::future::{IntoFuture, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::inspect::{EvictMode, Evicted};
use leasehold::pool::{Permit, Permits, Pool};
use leasehold::{Error, LockManager, LossReason};
use leasehold_testkit::{Arena, FaultProxy, Kind, on_every_store};
use tokio::sync::mpsc;
use tokio::time::timeout;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(
    free_members_are_given_one_by_one,
    waiters_are_served_in_the_order_of_their_requests,
    a_member_by_name_and_the_pool_share_one_queue,
    the_same_in_one_process,
    several_come_together_or_not_at_all,
    three_of_four_are_served_while_singles_keep_coming,
    those_who_want_many_never_hold_a_part_each,
    requests_for_many_are_served_in_their_order,
    requests_for_other_members_need_not_wait,
    a_dropped_request_keeps_nothing,
    a_dropped_wait_keeps_nothing,
    a_wait_ends_at_its_deadline_and_leaves_no_trace,
    permits_are_renewed_on_the_terms_of_the_request,
    an_evicted_member_goes_to_a_waiter_for_any,
    a_part_that_is_taken_away_is_collected_again,
    a_lost_turn_releases_everything_and_collects_again,
    polling_works_without_events,
    work_is_cancelled_when_a_member_is_lost,
    work_finds_the_fence_of_its_members,
    shutdown_ends_every_wait,
    bad_pools_are_refused,
    many_tasks_never_meet,
);

async fn work_finds_the_fence_of_its_members(arena: Arena) {
    let pool = pool(&arena, 3).await;
    let (found, own) =
        pool.acquire().run(async |one| (leasehold::current_fence(), one.try_fence())).await.expect("free");
    assert!(found.is_some() && found == own, "{found:?} and {own:?}");
    let highest = |several: &Permits| several.iter().filter_map(|permit| permit.try_fence()).max();
    let (found, own) =
        pool.any(2).run(async |several| (leasehold::current_fence(), highest(several))).await.expect("free");
    assert!(found.is_some() && found == own, "{found:?} and {own:?}");
    assert_eq!(leasehold::current_fence(), None);
}

async fn pool(arena: &Arena, members: u32) -> Pool {
    arena.manager().await.pool("gpu_lock", 0..members).expect("a pool")
}

/// Acquires every member.
async fn fill(pool: &Pool) -> Vec<Option<Permit>> {
    let mut all = Vec::new();
    for _ in pool.indices() {
        all.push(Some(pool.acquire().owner("full").no_wait().await.expect("free")));
    }
    all
}

/// Waits until the queue of a member has `wanted` waiters.
async fn in_line(pool: &Pool, index: usize, waiters: usize) {
    let waiting = async {
        while pool.status().await.expect("answered")[index].lock.waiters.len() != waiters {
            tokio::time::sleep(ms(1)).await;
        }
    };
    timeout(LONG, waiting).await.unwrap_or_else(|_| panic!("never {waiters} in line for member {index}"));
}

/// Waits until there are no holders and no waiters.
async fn nothing_left(manager: &LockManager, pool: &Pool) {
    let empty = async {
        loop {
            let held = manager.list("", None, 10).await.expect("answered").locks;
            let waiters: usize = pool.status().await.expect("answered").iter().map(|m| m.lock.waiters.len()).sum();
            if held.is_empty() && waiters == 0 {
                return;
            }
            tokio::time::sleep(ms(2)).await;
        }
    };
    timeout(LONG, empty).await.expect("nothing is left");
}

/// Waiters that report when they are served and keep the lock.
struct Line {
    tell: mpsc::UnboundedSender<(&'static str, Served)>,
    served: mpsc::UnboundedReceiver<(&'static str, Served)>,
}

type Served = Vec<Permit>;

impl Line {
    fn new() -> Self {
        let (tell, served) = mpsc::unbounded_channel();
        Self { tell, served }
    }

    fn ask(&self, who: &'static str, pool: &Pool, count: usize) {
        let (pool, tell) = (pool.clone(), self.tell.clone());
        tokio::spawn(async move {
            let got = match count {
                1 => vec![pool.acquire().owner(who).wait_up_to(LONG).await.expect("its turn")],
                _ => pool.any(count).owner(who).wait_up_to(LONG).await.expect("its turn").into_iter().collect(),
            };
            drop(tell.send((who, got)));
        });
    }

    async fn next(&mut self) -> (&'static str, Served) {
        timeout(LONG, self.served.recv()).await.expect("somebody is served").expect("somebody waits")
    }

    fn nobody_else(&mut self) {
        assert!(self.served.try_recv().is_err(), "somebody was served too early");
    }
}

async fn free_members_are_given_one_by_one(arena: Arena) {
    let (a, b) = (pool(&arena, 3).await, pool(&arena, 3).await);
    let first = a.acquire().owner("alice").await.expect("free");
    let second = b.acquire().owner("bob").await.expect("free");
    let third = a.acquire().no_wait().await.expect("free");
    assert_eq!([first.index(), second.index(), third.index()], [0, 1, 2]);
    assert_eq!((second.name().as_str(), second.is_valid()), ("gpu_lock:1", true));
    let Err(error) = b.acquire().no_wait().await else { panic!("all are taken") };
    let Error::PoolBusy { name, wanted, members, waited, .. } = &error else { panic!("{error:?}") };
    assert_eq!((name.as_str(), *wanted, *waited), ("gpu_lock", 1, Duration::ZERO));
    let owners: Vec<_> = members.iter().map(|m| m.lock.holder.as_ref().map(|h| h.owner.task().to_owned())).collect();
    assert_eq!(owners[..2], [Some("alice".to_owned()), Some("bob".to_owned())]);
    let text = error.to_string();
    assert!(text.starts_with("none of the 3 members of pool \"gpu_lock\" is free: 0 is held by alice"), "{text}");
    assert!(error.is_retryable() && error.name() == Some(a.name()));
    assert!(second.release().await.expect("answered"));
    let again = a.acquire().no_wait().await.expect("one is free again");
    assert_eq!(again.index(), 1);
    let status = b.status().await.expect("answered");
    assert_eq!(status.iter().map(|m| m.index).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(status[1].lock.holder.as_ref().expect("held").id, again.holder_id());
}

async fn waiters_are_served_in_the_order_of_their_requests(arena: Arena) {
    let full = pool(&arena, 2).await;
    let mut held = fill(&full).await;
    let mut line = Line::new();
    let names = ["a", "b", "c", "d", "e", "f"];
    for (before, who) in names.iter().enumerate() {
        line.ask(who, &pool(&arena, 2).await, 1);
        // It is in both queues before the next one starts.
        in_line(&full, 0, before + 1).await;
        in_line(&full, 1, before + 1).await;
    }
    // Whichever member is released, the oldest waiter is next.
    for (number, expected) in names.iter().enumerate() {
        let which = [1, 1, 0, 1, 0, 0][number];
        let permit = held[which].take().expect("held");
        assert_eq!(permit.index(), u32::try_from(which).expect("small"));
        permit.release().await.expect("answered");
        let (who, mut got) = line.next().await;
        assert_eq!((who, got[0].index()), (*expected, u32::try_from(which).expect("small")));
        line.nobody_else();
        held[which] = got.pop();
    }
    drop(held);
    nothing_left(&arena.manager().await, &full).await;
}

async fn a_member_by_name_and_the_pool_share_one_queue(arena: Arena) {
    let managers = [arena.manager().await, arena.manager().await, arena.manager().await];
    older_first(&arena, &managers, 2).await;
}

async fn the_same_in_one_process(arena: Arena) {
    let one = arena.manager().await;
    // Its tasks share one place in the queue of each member.
    older_first(&arena, &[one.clone(), one.clone(), one], 1).await;
}

/// By name for 0, then any, then by name for 1.
async fn older_first(arena: &Arena, managers: &[LockManager; 3], both_seen: usize) {
    let full = pool(arena, 2).await;
    let mut held = fill(&full).await;
    let mut line = Line::new();
    let (by_name, mut named) = mpsc::unbounded_channel();
    let ask_by_name = |manager: &LockManager, name: &'static str| {
        let (manager, by_name) = (manager.clone(), by_name.clone());
        tokio::spawn(async move {
            let guard = manager.lock(name).wait_up_to(LONG).await.expect("its turn");
            drop(by_name.send(guard));
        });
    };
    ask_by_name(&managers[0], "gpu_lock:0");
    in_line(&full, 0, 1).await;
    line.ask("any", &managers[1].pool("gpu_lock", 0..2).expect("a pool"), 1);
    in_line(&full, 0, both_seen).await;
    in_line(&full, 1, 1).await;
    ask_by_name(&managers[2], "gpu_lock:1");
    in_line(&full, 1, both_seen).await;
    held[0].take().expect("held").release().await.expect("answered");
    let zero = timeout(LONG, named.recv()).await.expect("in time").expect("its turn");
    assert_eq!(zero.name().as_str(), "gpu_lock:0", "by name came first");
    line.nobody_else();
    held[1].take().expect("held").release().await.expect("answered");
    let (_, got) = line.next().await;
    assert_eq!(got[0].index(), 1, "any came before the second by name");
    assert!(named.try_recv().is_err(), "not yet");
    drop(got);
    let one = timeout(LONG, named.recv()).await.expect("in time").expect("its turn");
    assert_eq!(one.name().as_str(), "gpu_lock:1");
    drop((zero, one));
    nothing_left(&managers[0], &full).await;
}

async fn several_come_together_or_not_at_all(arena: Arena) {
    let (a, b) = (pool(&arena, 4).await, pool(&arena, 4).await);
    let two = a.any(2).await.expect("free");
    assert_eq!(two.indices(), [0, 1]);
    let Err(Error::PoolBusy { wanted: 3, members, .. }) = b.any(3).no_wait().await else { panic!("only two are free") };
    assert_eq!(members.iter().filter(|m| m.lock.holder.is_none()).count(), 2);
    // The members that it had are released.
    let rest = timeout(LONG, b.any(2).into_future()).await.expect("in time").expect("two are free");
    assert_eq!(rest.indices(), [2, 3]);
    assert!(b.any(2).wait_up_to(ms(50)).optional().await.expect("answered").is_none());
    for index in 0..4 {
        in_line(&a, index, 0).await;
    }
    assert!(two.release().await.expect("answered"));
    let one = b.acquire().no_wait().await.expect("free");
    assert_eq!(one.index(), 0);
    assert!(rest.release().await.expect("answered"));
    let all = a.any(3).no_wait().await.expect("three are free");
    assert_eq!(all.indices(), [1, 2, 3]);
    drop((one, all));
    nothing_left(&arena.manager().await, &a).await;
}

async fn three_of_four_are_served_while_singles_keep_coming(arena: Arena) {
    let stop = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicUsize::new(0));
    let mut singles = Vec::new();
    for _ in 0..3 {
        let pool = pool(&arena, 4).await;
        for _ in 0..4 {
            let (pool, stop, served) = (pool.clone(), stop.clone(), served.clone());
            singles.push(tokio::spawn(async move {
                while !stop.load(SeqCst) {
                    let permit = pool.acquire().wait_up_to(LONG).await.expect("its turn");
                    served.fetch_add(1, SeqCst);
                    tokio::time::sleep(ms(3)).await;
                    permit.release().await.expect("answered");
                }
            }));
        }
    }
    let many = pool(&arena, 4).await;
    in_line(&many, 0, 2).await;
    let mut between = Vec::new();
    for _ in 0..5 {
        let before = served.load(SeqCst);
        let three = timeout(LONG, many.any(3).into_future()).await.expect("not starved").expect("answered");
        between.push(served.load(SeqCst) - before);
        assert_eq!(three.len(), 3);
        three.release().await.expect("answered");
        let goal = served.load(SeqCst) + 8;
        let go_on = async {
            while served.load(SeqCst) < goal {
                tokio::time::sleep(ms(1)).await;
            }
        };
        timeout(LONG, go_on).await.expect("singles are served again");
    }
    stop.store(true, SeqCst);
    for single in singles {
        timeout(LONG, single).await.expect("in time").expect("no panic");
    }
    // Those before it in the queue and the holders, but not all that came meanwhile.
    assert!(between.iter().all(|n| *n < 40), "so many singles were served before three: {between:?}");
    nothing_left(&arena.manager().await, &many).await;
}

async fn those_who_want_many_never_hold_a_part_each(arena: Arena) {
    let inside: Arc<[AtomicUsize; 4]> = Arc::default();
    let mut tasks = Vec::new();
    for number in 0..6 {
        let pool = pool(&arena, 4).await;
        let inside = inside.clone();
        let count = [3, 2, 3, 4, 2, 3][number];
        tasks.push(tokio::spawn(async move {
            for _ in 0..6 {
                let permits = pool.any(count).wait_up_to(LONG).await.expect("its turn");
                assert_eq!(permits.len(), count);
                for index in permits.indices() {
                    assert_eq!(inside[index as usize].fetch_add(1, SeqCst), 0, "two on {index}");
                }
                tokio::task::yield_now().await;
                for index in permits.indices() {
                    inside[index as usize].fetch_sub(1, SeqCst);
                }
                permits.release().await.expect("answered");
            }
        }));
    }
    for task in tasks {
        timeout(LONG, task).await.expect("nobody waits for ever").expect("no panic");
    }
    nothing_left(&arena.manager().await, &pool(&arena, 4).await).await;
}

async fn requests_for_many_are_served_in_their_order(arena: Arena) {
    let (full, manager) = (pool(&arena, 3).await, arena.manager().await);
    let mut held = fill(&full).await;
    let mut line = Line::new();
    line.ask("two", &pool(&arena, 3).await, 2);
    in_line(&full, 2, 1).await;
    line.ask("two more", &pool(&arena, 3).await, 2);
    let turn = async {
        while manager.info("gpu_lock:collecting").await.expect("answered").waiters.is_empty() {
            tokio::time::sleep(ms(1)).await;
        }
    };
    timeout(LONG, turn).await.expect("waits for its turn");
    line.ask("one", &pool(&arena, 3).await, 1);
    in_line(&full, 0, 2).await;
    // One is kept for the first, although it would be enough for the last.
    held[1].take().expect("held").release().await.expect("answered");
    tokio::time::sleep(ms(50)).await;
    line.nobody_else();
    held[0].take().expect("held").release().await.expect("answered");
    let (who, mut first) = line.next().await;
    assert_eq!((who, first.len()), ("two", 2));
    // The second is served next, before the last.
    let owners = async || {
        let status = full.status().await.expect("answered");
        status[2].lock.waiters.iter().map(|w| w.owner.task().to_owned()).collect::<Vec<_>>()
    };
    let second = async {
        while owners().await != ["two more", "one"] {
            tokio::time::sleep(ms(1)).await;
        }
    };
    timeout(LONG, second).await.expect("the second collects");
    held[2].take().expect("held").release().await.expect("answered");
    // Only one is missing, and the last would take it. With both at once the two tasks would race to report.
    drop(first.pop());
    let (who, second) = line.next().await;
    assert_eq!((who, second.len()), ("two more", 2));
    line.nobody_else();
    drop((first, second));
    let (who, last) = line.next().await;
    assert_eq!((who, last.len()), ("one", 1));
    drop(last);
    nothing_left(&manager, &full).await;
}

async fn requests_for_other_members_need_not_wait(arena: Arena) {
    let (manager, other) = (arena.manager().await, arena.manager().await);
    let (low, high) = (manager.pool("gpu_lock", [0, 1]), other.pool("gpu_lock", [2, 3]));
    let (low, high) = (low.expect("a pool"), high.expect("a pool"));
    let zero = manager.lock("gpu_lock:0").await.expect("free");
    let mut line = Line::new();
    line.ask("low", &pool(&arena, 2).await, 2);
    in_line(&low, 0, 1).await;
    assert!(manager.is_locked("gpu_lock:collecting").await.expect("answered"), "somebody collects");
    let both = high.any(2).no_wait().await.expect("both are free");
    assert_eq!(both.indices(), [2, 3]);
    both.release().await.expect("answered");
    let both = timeout(LONG, high.any(2).ttl(ms(60_000)).into_future()).await.expect("in time").expect("free");
    line.nobody_else();
    tokio::time::sleep(ms(100)).await;
    let holder = manager.holder("gpu_lock:2").await.expect("answered").expect("held");
    assert_eq!(holder.ttl, Some(ms(60_000)), "on the terms that were asked for");
    zero.release().await.expect("answered");
    let (_, got) = line.next().await;
    drop((both, got));
    nothing_left(&manager, &pool(&arena, 4).await).await;
}

/// Polls a request and drops it, with one more poll each time, until it is done.
async fn dropped_everywhere<T>(
    request: impl Fn() -> std::pin::Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>,
    after: impl AsyncFn(),
) {
    for polls in 0..200 {
        let mut sent = request();
        let mut done = None;
        for _ in 0..polls {
            if let Poll::Ready(answer) = poll_fn(|cx| Poll::Ready(sent.as_mut().poll(cx))).await {
                done = Some(answer);
                break;
            }
            tokio::time::sleep(Duration::from_micros(300)).await;
        }
        drop(sent);
        let finished = done.is_some();
        drop(done);
        after().await;
        if finished {
            return;
        }
    }
    panic!("never answered");
}

async fn a_dropped_request_keeps_nothing(arena: Arena) {
    let (a, b) = (pool(&arena, 3).await, pool(&arena, 3).await);
    let whole = async || {
        let all = timeout(LONG, b.any(3).into_future()).await.expect("in time").expect("nothing is left behind");
        all.release().await.expect("answered");
    };
    dropped_everywhere(|| a.acquire().into_future(), whole).await;
    dropped_everywhere(|| a.any(2).into_future(), whole).await;
    nothing_left(&arena.manager().await, &b).await;
}

async fn a_dropped_wait_keeps_nothing(arena: Arena) {
    let (full, a, b) = (pool(&arena, 2).await, pool(&arena, 2).await, pool(&arena, 2).await);
    for polls in [1, 2, 3, 4, 6, 8, 12, 20] {
        for count in [1, 2] {
            let mut held = fill(&full).await;
            let mut line = Line::new();
            let mut sent: std::pin::Pin<Box<dyn Future<Output = ()> + Send>> = {
                let a = a.clone();
                match count {
                    1 => Box::pin(async move { drop(a.acquire().await) }),
                    _ => Box::pin(async move { drop(a.any(2).await) }),
                }
            };
            for _ in 0..polls {
                poll_fn(|cx| Poll::Ready(sent.as_mut().poll(cx).is_pending())).await;
                tokio::time::sleep(Duration::from_micros(300)).await;
            }
            line.ask("next", &b, 1);
            // The grant crosses the leave: it is passed on at once, not after 2 s.
            let began = Instant::now();
            let release = held[0].take().expect("held").release();
            let (answer, ()) = tokio::join!(release, async { drop(sent) });
            answer.expect("answered");
            let (_, got) = line.next().await;
            assert!(began.elapsed() < ms(1_500), "{:?}", began.elapsed());
            drop((got, held));
            nothing_left(&arena.manager().await, &full).await;
        }
    }
}

async fn a_wait_ends_at_its_deadline_and_leaves_no_trace(arena: Arena) {
    let (full, late) = (pool(&arena, 2).await, pool(&arena, 2).await);
    let held = fill(&full).await;
    for count in [1, 2] {
        let began = Instant::now();
        let answer = match count {
            1 => late.acquire().wait_up_to(ms(300)).await.map(drop),
            _ => late.any(count).wait_up_to(ms(300)).await.map(drop),
        };
        let took = began.elapsed();
        let Err(Error::PoolBusy { members, waited, .. }) = answer else { panic!("{answer:?}") };
        assert!(took >= ms(300) && took < ms(550), "{took:?}");
        assert!(waited >= ms(300), "{waited:?}");
        let holders: Vec<_> =
            members.iter().map(|m| m.lock.holder.as_ref().map(|h| h.owner.task().to_owned())).collect();
        assert_eq!(holders, [Some("full".to_owned()), Some("full".to_owned())]);
        for index in [0, 1] {
            in_line(&full, index, 0).await;
        }
    }
    drop(held);
    nothing_left(&arena.manager().await, &full).await;
}

async fn permits_are_renewed_on_the_terms_of_the_request(arena: Arena) {
    let (a, manager) = (pool(&arena, 3).await, arena.manager().await);
    let short = a.acquire().ttl(ms(300)).await.expect("free");
    let two = a.any(2).ttl(Duration::from_secs(600)).owner("long").await.expect("free");
    tokio::time::sleep(ms(900)).await;
    assert!(short.is_valid() && short.release().await.expect("answered"), "ours to the end");
    for permit in two.iter() {
        let holder = manager.holder(permit.name()).await.expect("answered").expect("held");
        assert_eq!(holder.ttl, Some(Duration::from_secs(600)), "not the terms of collecting");
        assert!(holder.ttl_left.is_some_and(|left| left > Duration::from_secs(590)), "{:?}", holder.ttl_left);
        assert!(permit.remaining() > Duration::from_secs(580), "{:?}", permit.remaining());
    }
    two.release().await.expect("answered");
    let bounded = a.any(2).ttl(ms(200)).max_hold(ms(500)).await.expect("free");
    let (_, why) = timeout(LONG, bounded.lost()).await.expect("told");
    assert_eq!(why, LossReason::MaxHold);
    drop(bounded);
    let ends = timeout(LONG, a.any(2).ttl(ms(200)).renew(false).into_future()).await.expect("in time").expect("free");
    let (_, why) = timeout(LONG, ends.lost()).await.expect("told");
    assert_eq!(why, LossReason::Expired);
    drop(ends);
    nothing_left(&manager, &a).await;
}

async fn an_evicted_member_goes_to_a_waiter_for_any(arena: Arena) {
    let (full, manager) = (pool(&arena, 2).await, arena.manager().await);
    let held = fill(&full).await;
    let mut line = Line::new();
    line.ask("any", &pool(&arena, 2).await, 1);
    in_line(&full, 1, 1).await;
    let victim = held[1].as_ref().expect("held");
    let evicted = manager.evict("gpu_lock:1", victim.holder_id(), EvictMode::Revoke, "test").await.expect("answered");
    assert!(matches!(evicted, Evicted::Done(_)), "{evicted:?}");
    assert_eq!(timeout(LONG, victim.lost()).await.expect("told"), LossReason::Revoked);
    line.nobody_else();
    drop(held);
    let (_, got) = line.next().await;
    drop(got);
    nothing_left(&manager, &full).await;
}

async fn a_part_that_is_taken_away_is_collected_again(arena: Arena) {
    let (full, manager) = (pool(&arena, 2).await, arena.manager().await);
    let mut held = fill(&full).await;
    let mut line = Line::new();
    line.ask("both", &pool(&arena, 2).await, 2);
    in_line(&full, 0, 1).await;
    held[0].take().expect("held").release().await.expect("answered");
    let part = async {
        loop {
            let holder = manager.holder("gpu_lock:0").await.expect("answered").expect("handed on");
            if holder.owner.task() == "both" {
                return holder;
            }
        }
    };
    let part = timeout(LONG, part).await.expect("it has a part");
    let evicted = manager.evict("gpu_lock:0", part.id, EvictMode::Revoke, "test").await.expect("answered");
    assert!(matches!(evicted, Evicted::Done(_)), "{evicted:?}");
    line.nobody_else();
    let again = async {
        while manager.holder("gpu_lock:0").await.expect("answered").is_none_or(|holder| holder.id == part.id) {
            tokio::time::sleep(ms(1)).await;
        }
    };
    timeout(LONG, again).await.expect("asked for again");
    held[1].take().expect("held").release().await.expect("answered");
    let (_, got) = line.next().await;
    assert!(got.iter().all(|permit| permit.is_valid()), "{got:?}");
    drop(got);
    nothing_left(&manager, &full).await;
}

async fn a_lost_turn_releases_everything_and_collects_again(arena: Arena) {
    let (full, manager) = (pool(&arena, 2).await, arena.manager().await);
    let mut held = fill(&full).await;
    let mut line = Line::new();
    line.ask("both", &pool(&arena, 2).await, 2);
    in_line(&full, 0, 1).await;
    held[0].take().expect("held").release().await.expect("answered");
    let mine =
        async |name: &str| manager.holder(name).await.expect("answered").filter(|holder| holder.owner.task() == "both");
    let part = async {
        while mine("gpu_lock:0").await.is_none() {
            tokio::time::sleep(ms(1)).await;
        }
    };
    timeout(LONG, part).await.expect("it has a part");
    let turn = mine("gpu_lock:collecting").await.expect("it has the turn");
    manager.evict("gpu_lock:collecting", turn.id, EvictMode::Force, "test").await.expect("answered");
    let anew = async {
        while mine("gpu_lock:collecting").await.is_none_or(|again| again.id == turn.id)
            || mine("gpu_lock:0").await.is_none()
        {
            tokio::time::sleep(ms(1)).await;
        }
    };
    timeout(LONG, anew).await.expect("it collects again");
    held[1].take().expect("held").release().await.expect("answered");
    let (_, got) = line.next().await;
    assert!(got.iter().all(|permit| permit.is_valid()), "{got:?}");
    drop(got);
    nothing_left(&manager, &full).await;
}

async fn polling_works_without_events(arena: Arena) {
    let mut options = arena.options();
    options.notifications = false;
    let full = pool(&arena, 2).await;
    let mut held = fill(&full).await;
    let poller = arena.manager_with(options).await.pool("gpu_lock", 0..2).expect("a pool");
    let mut line = Line::new();
    line.ask("one", &poller, 1);
    in_line(&full, 0, 1).await;
    line.ask("both", &poller, 2);
    held[1].take().expect("held").release().await.expect("answered");
    let (who, got) = line.next().await;
    assert_eq!(who, "one");
    drop((got, held));
    let (who, got) = line.next().await;
    assert_eq!(who, "both");
    drop(got);
    nothing_left(&arena.manager().await, &full).await;
}

async fn work_is_cancelled_when_a_member_is_lost(arena: Arena) {
    let (pool, manager) = (pool(&arena, 2).await, arena.manager().await);
    let index = pool.acquire().run(async |gpu: &Permit| gpu.index()).await.expect("answered");
    assert_eq!(index, 0);
    let lost = pool.any(2).run(async |gpus: &Permits| {
        let id = gpus[1].holder_id();
        manager.evict("gpu_lock:1", id, EvictMode::Revoke, "test").await.expect("answered");
        std::future::pending::<()>().await;
    });
    let lost = timeout(LONG, lost).await.expect("cancelled");
    assert!(matches!(&lost, Err(Error::Lost { name, .. }) if name.as_str() == "gpu_lock:1"), "{lost:?}");
    nothing_left(&manager, &pool).await;
}

async fn shutdown_ends_every_wait(arena: Arena) {
    let (full, manager) = (pool(&arena, 2).await, arena.manager().await);
    let held = fill(&full).await;
    let pool = manager.pool("gpu_lock", 0..2).expect("a pool");
    let waits: Vec<_> = [1, 1, 2]
        .map(|count| {
            let pool = pool.clone();
            tokio::spawn(async move {
                match count {
                    1 => pool.acquire().await.map(drop),
                    _ => pool.any(count).await.map(drop),
                }
            })
        })
        .into();
    in_line(&full, 0, 1).await;
    manager.shutdown().await;
    for wait in waits {
        let answer = timeout(LONG, wait).await.expect("in time").expect("no panic");
        assert!(matches!(answer, Err(Error::ShutDown { .. })), "{answer:?}");
    }
    assert!(matches!(pool.acquire().await, Err(Error::ShutDown { .. })));
    drop(held);
    nothing_left(&arena.manager().await, &full).await;
}

async fn bad_pools_are_refused(arena: Arena) {
    let manager = arena.manager().await;
    let refused = |answer: Result<Pool, Error>, text: &str| {
        let Err(error @ Error::Invalid(_)) = answer else { panic!("{answer:?}") };
        assert!(error.to_string().contains(text), "{error}");
    };
    refused(manager.pool("p", 0..0), "pool \"p\" has no members: give it 1 to 64");
    refused(manager.pool("p", 0..65), "has more than 64 members");
    refused(manager.pool("p", 0..u32::MAX), "has more than 64 members");
    refused(manager.pool("p", [1, 2, 1]), "has member 1 twice");
    refused(manager.pool("", 0..2), "is empty");
    refused(manager.pool("x".repeat(511), 0..2), "is longer than 512 bytes");
    let most = manager.pool("p", 0..64).expect("a pool");
    assert_eq!(most.indices().len(), Pool::MAX_MEMBERS);
    let seven = manager.pool("p", [7, 3]).expect("a pool").acquire().await.expect("free");
    assert_eq!(seven.index(), 7);
    seven.release().await.expect("answered");
    for count in [0, 65] {
        let Err(error @ Error::Invalid(_)) = most.any(count).await else { panic!("{count} of 64") };
        assert!(error.to_string().contains(&format!("ask for 1 to 64 of them, not {count}")), "{error}");
    }
    assert!(matches!(most.acquire().ttl(Duration::ZERO).await, Err(Error::Invalid(_))));
    let all = most.any(64).no_wait().await.expect("all are free");
    assert!(most.acquire().no_wait().optional().await.expect("answered").is_none());
    all.release().await.expect("answered");
    nothing_left(&manager, &most).await;
}

/// 200 tasks in one process: never more holders than members, never two on one member.
async fn many_tasks_never_meet(arena: Arena) {
    let inside: Arc<[AtomicUsize; 4]> = Arc::default();
    let pool = pool(&arena, 4).await;
    let tasks: Vec<_> = (0..200)
        .map(|_| {
            let (pool, inside) = (pool.clone(), inside.clone());
            tokio::spawn(async move {
                let permit = pool.acquire().wait_up_to(LONG).await.expect("its turn");
                let mine = &inside[permit.index() as usize];
                assert_eq!(mine.fetch_add(1, SeqCst), 0, "two on {}", permit.index());
                tokio::time::sleep(ms(1)).await;
                mine.fetch_sub(1, SeqCst);
                let index = permit.index();
                permit.release().await.expect("answered");
                index
            })
        })
        .collect();
    let mut by_index: HashMap<u32, usize> = HashMap::new();
    for task in tasks {
        *by_index.entry(timeout(LONG, task).await.expect("in time").expect("no panic")).or_default() += 1;
    }
    assert_eq!(by_index.len(), 4, "all members are used: {by_index:?}");
    nothing_left(&arena.manager().await, &pool).await;
}

/// Two processes with many tasks each: tasks are served in the order of their requests. Only the memory store replies at once,
/// so that one poll puts a request into the queue.
#[tokio::test]
async fn tasks_of_several_processes_are_served_in_the_order_of_their_requests() {
    let arena = Arena::new(Kind::Memory).await;
    let (full, processes) = (pool(&arena, 2).await, [pool(&arena, 2).await, pool(&arena, 2).await]);
    let mut held = fill(&full).await;
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for number in 0..20 {
        let mut wait = Box::pin(processes[[0, 1, 1, 0, 0][number % 5]].acquire().wait_up_to(LONG).into_future());
        assert!(poll_fn(|cx| Poll::Ready(wait.as_mut().poll(cx).is_pending())).await, "all are taken");
        let order = order.clone();
        tasks.push(tokio::spawn(async move {
            let permit = wait.await.expect("its turn");
            order.lock().expect("no panic").push(number);
            permit
        }));
    }
    for index in [0, 1] {
        in_line(&full, index, 2).await;
    }
    // The oldest hold is released, so the members alternate.
    let mut inside: VecDeque<Permit> = held.drain(..).flatten().collect();
    for (number, task) in tasks.into_iter().enumerate() {
        inside.pop_front().expect("held").release().await.expect("answered");
        inside
            .push_back(timeout(LONG, task).await.unwrap_or_else(|_| panic!("{number} is not next")).expect("no panic"));
    }
    assert_eq!(*order.lock().expect("no panic"), (0..20).collect::<Vec<_>>());
    drop(inside);
    nothing_left(&arena.manager().await, &full).await;
}

/// The connection breaks while a request waits for any member, and the members are released meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_connection_does_not_lose_a_waiter() {
    let arena = Arena::new(Kind::Redis).await;
    let proxy = FaultProxy::in_front_of(arena.server());
    let full = pool(&arena, 2).await;
    for count in [1, 2] {
        let mut options = arena.options();
        options.journal = None;
        let far = LockManager::connect_with(&proxy.url(), options).await.expect("a manager");
        let held = fill(&full).await;
        let mut line = Line::new();
        line.ask("far", &far.pool("gpu_lock", 0..2).expect("a pool"), count);
        in_line(&full, 1, 1).await;
        proxy.refuse(true);
        assert!(proxy.reset_all() > 0);
        drop(held);
        proxy.refuse(false);
        let (_, got) = line.next().await;
        assert_eq!(got.len(), count);
        drop(got);
        far.shutdown().await;
        nothing_left(&arena.manager().await, &full).await;
    }
}

/// A request during an outage waits for the store, or reports in time that the outcome is unknown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_store_is_waited_for_or_reported() {
    let arena = Arena::new(Kind::Redis).await;
    let proxy = FaultProxy::in_front_of(arena.server());
    let far = LockManager::connect_with(&proxy.url(), arena.options()).await.expect("a manager");
    let far = far.pool("gpu_lock", 0..2).expect("a pool");
    let full = pool(&arena, 2).await;
    let held = fill(&full).await;
    proxy.refuse(true);
    assert!(proxy.reset_all() > 0);
    for count in [1, 2] {
        let began = Instant::now();
        let answer = match count {
            1 => far.acquire().wait_up_to(ms(300)).await.map(drop),
            _ => far.any(count).wait_up_to(ms(300)).await.map(drop),
        };
        assert!(matches!(&answer, Err(Error::Store { name, .. }) if name == far.name()), "{answer:?}");
        assert!(began.elapsed() < ms(550), "{:?}", began.elapsed());
    }
    let mut line = Line::new();
    line.ask("far", &far, 1);
    proxy.refuse(false);
    in_line(&full, 1, 1).await;
    drop(held);
    let (_, got) = line.next().await;
    drop(got);
    nothing_left(&arena.manager().await, &full).await;
}

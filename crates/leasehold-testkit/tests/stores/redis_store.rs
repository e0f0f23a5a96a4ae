//! Cases that only Redis has: values of other clients, wrong types, lost scripts and counters, full memory.

use std::time::Duration;

use crate::support::{LONG, RedisHere, World, acquires, claim, is_granted, is_held, name, queues, renewal, takes, ttl};
use leasehold::inspect::{Cursor, EvictMode, Evicted};
use leasehold::lease::Moment;
use leasehold::store::redis::{RedisOptions, RedisStore};
use leasehold::store::{
    Acquire, AcquireRequest, Inspect, KeySpace, Left, Namespace, Release, Renewed, Store, StoreErrorKind, Try,
};
use redis::Value;

const KEY: &str = "leasehold:lock:a";

async fn raw(world: &RedisHere, parts: &[&str]) -> String {
    let value = world.0.command(parts).await;
    redis::from_redis_value(value).unwrap_or_else(|error| panic!("{parts:?}: {error}"))
}

async fn number(world: &RedisHere, parts: &[&str]) -> i64 {
    redis::from_redis_value(world.0.command(parts).await).expect("a number")
}

#[tokio::test]
async fn a_value_reads_as_documented() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let mine = claim("a");
    let fence = takes(&store, &mine).await.fence.expect("fenced");
    let value = raw(&world, &["GET", KEY]).await;
    let parts: Vec<&str> = value.splitn(8, ' ').collect();
    assert_eq!(parts[..4], ["lh1", "0", mine.token.reveal(), "0000000000000000"]);
    assert!(parts[4].starts_with("lh1:inbox:") && parts[4].len() == 32, "{value}");
    let server_s: Vec<u64> = redis::from_redis_value(world.0.command(&["TIME"]).await).expect("a time");
    let since: u64 = parts[5].parse().expect("a number");
    assert!(since.abs_diff(server_s[0] * 1_000) < 3_000, "{value}");
    assert_eq!(parts[6], "30000");
    assert!(parts[7].starts_with("battery@") && parts[7].ends_with(&format!(":{}", std::process::id())), "{value}");
    // The first renewal writes the fence.
    assert_eq!(store.renew(&[renewal(&mine, Some(fence))]).await, [Renewed::Renewed]);
    assert_eq!(raw(&world, &["GETRANGE", KEY, "39", "54"]).await, format!("{:016}", fence.get()));
    // A waiter sets the flag and is in a queue that expires.
    let waiter = AcquireRequest { listens: false, ..claim("a") };
    let ticket = queues(&store, &waiter).await.ticket;
    assert_eq!(raw(&world, &["GETRANGE", KEY, "4", "4"]).await, "1");
    let entry: Vec<String> =
        redis::from_redis_value(world.0.command(&["ZRANGE", "lh1:queue:leasehold:lock:a", "0", "-1"]).await)
            .expect("a queue");
    let expected = format!("{} - 30000 {} battery@", waiter.token.reveal(), waiter.since_ms);
    assert!(entry[0].starts_with(&expected), "{entry:?}");
    assert!(ticket.0 > fence.get());
    assert!(number(&world, &["PTTL", "lh1:queue:leasehold:lock:a"]).await > 0);
    assert!(number(&world, &["PTTL", "lh1:polls:leasehold:lock:a"]).await > 0);
    let id = mine.token.holder_id();
    store.evict(&mine.name, id, EvictMode::Revoke).await.expect("an answer");
    assert_eq!(raw(&world, &["GETRANGE", KEY, "4", "4"]).await, "R");
}

#[tokio::test]
async fn lost_scripts_are_sent_again() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let flush = async || world.0.command(&["SCRIPT", "FLUSH", "SYNC"]).await;
    let mut pushes = store.pushes();
    let (holder, waiter, passer_by) = (claim("a"), claim("a"), claim("a"));
    flush().await;
    let fence = acquires(&store, &holder).await.fence;
    flush().await;
    let three = [renewal(&holder, fence), renewal(&waiter, fence), renewal(&holder, fence)];
    assert_eq!(store.renew(&three).await, [Renewed::Renewed, Renewed::Lost, Renewed::Renewed]);
    queues(&store, &waiter).await;
    flush().await;
    assert_eq!(store.release(&holder.name, &holder.token).await, Ok(Release::Released));
    is_granted(&mut pushes, &waiter).await;
    queues(&store, &passer_by).await;
    flush().await;
    assert_eq!(store.leave(&passer_by).await, Ok(Left::WasWaiting));
    flush().await;
    let forced = store.evict(&waiter.name, waiter.token.holder_id(), EvictMode::Force).await;
    assert!(matches!(forced, Ok(Evicted::Done(_))));
}

#[tokio::test]
async fn a_foreign_value_excludes_and_is_never_touched() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let mut pushes = store.pushes();
    world.0.command(&["SET", KEY, "locked_by_tts", "PX", "60000"]).await;
    let (mine, passer_by) = (claim("a"), claim("a"));
    let holder = is_held(&store, &passer_by).await.expect("known");
    assert!(holder.foreign && !holder.listens && holder.owner.task() == "locked_by_tts");
    let place = queues(&store, &mine).await;
    let seen = place.holder.expect("a holder");
    assert!(seen.foreign && seen.ttl_left > Some(Duration::from_secs(50)));
    assert_eq!(store.release(&mine.name, &mine.token).await, Ok(Release::NotOwner));
    assert_eq!(store.release_emergency(&mine.name, &mine.token).await, Ok(Release::NotOwner));
    assert_eq!(store.renew(&[renewal(&mine, None)]).await, [Renewed::Lost]);
    let revoked = store.evict(&mine.name, seen.id, EvictMode::Revoke).await;
    assert!(matches!(revoked, Ok(Evicted::Foreign(found)) if found.id == seen.id));
    let other = store.evict(&mine.name, mine.token.holder_id(), EvictMode::Force).await;
    assert!(matches!(other, Ok(Evicted::ChangedHands(found)) if found.id == seen.id));
    assert_eq!(raw(&world, &["GET", KEY]).await, "locked_by_tts");
    // Only a compared force ends it, and then the first waiter has the lock.
    let forced = store.evict(&mine.name, seen.id, EvictMode::Force).await;
    assert!(matches!(forced, Ok(Evicted::Done(found)) if found.foreign));
    is_granted(&mut pushes, &mine).await;
}

#[tokio::test]
async fn a_foreign_value_is_released_by_its_exact_value() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let mut pushes = store.pushes();
    let mine = claim("a");
    world.0.command(&["SET", KEY, "locked_by_tts", "PX", "60000"]).await;
    assert_eq!(store.release_value(&mine.name, "locked_by_tt").await, Ok(Release::NotOwner));
    assert_eq!(raw(&world, &["GET", KEY]).await, "locked_by_tts");
    assert_eq!(store.release_value(&mine.name, "locked_by_tts").await, Ok(Release::Released));
    assert_eq!(store.release_value(&mine.name, "locked_by_tts").await, Ok(Release::NotOwner), "it is free");
    // If there is a waiter, the lock is handed off in the same step.
    world.0.command(&["SET", KEY, "locked_by_tts", "PX", "60000"]).await;
    queues(&store, &mine).await;
    assert_eq!(store.release_value(&mine.name, "locked_by_tts").await, Ok(Release::Released));
    is_granted(&mut pushes, &mine).await;
    // Values of leasehold are not released this way, nor are values that are not strings.
    let record = raw(&world, &["GET", KEY]).await;
    assert_eq!(store.release_value(&mine.name, &record).await, Ok(Release::NotOwner));
    assert_eq!(raw(&world, &["GET", KEY]).await, record);
    world.0.command(&["DEL", KEY]).await;
    world.0.command(&["RPUSH", KEY, "locked_by_tts"]).await;
    assert_eq!(store.release_value(&mine.name, "locked_by_tts").await, Ok(Release::NotOwner));
}

#[tokio::test]
async fn another_type_at_the_key_is_a_foreign_holder() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    world.0.command(&["RPUSH", KEY, "x"]).await;
    let mine = claim("a");
    let held = is_held(&store, &mine).await.expect("known");
    assert!(held.foreign && held.owner.task() == "list" && held.ttl_left.is_none());
    assert_eq!(queues(&store, &mine).await.holder, Some(held.clone()));
    assert_eq!(store.holder(&mine.name).await, Ok(Some(held.clone())));
    assert_eq!(store.leave(&mine).await, Ok(Left::WasWaiting));
    assert_eq!(store.release(&mine.name, &mine.token).await, Ok(Release::NotOwner));
    assert_eq!(store.release_emergency(&mine.name, &mine.token).await, Ok(Release::NotOwner));
    assert_eq!(store.renew(&[renewal(&mine, None)]).await, [Renewed::Lost]);
    for mode in [EvictMode::Revoke, EvictMode::Force] {
        assert!(matches!(store.evict(&mine.name, held.id, mode).await, Ok(Evicted::Foreign(_))));
    }
    assert_eq!(raw(&world, &["LINDEX", KEY, "0"]).await, "x");
}

#[tokio::test]
async fn fences_rise_after_everything_was_lost() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let mut last = takes(&store, &claim("a")).await.fence;
    for round in 0..3 {
        world.0.command(&["FLUSHALL"]).await;
        let mine = claim("a");
        let fence = if round == 1 { acquires(&store, &mine).await.fence } else { takes(&store, &mine).await.fence };
        assert!(fence > last, "{fence:?} after {last:?}");
        last = fence;
    }
}

#[tokio::test]
async fn an_unusable_counter_grants_nothing_and_keeps_nothing() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let (holder, mine, waiter) = (claim("b"), claim("a"), claim("b"));
    takes(&store, &holder).await;
    queues(&store, &waiter).await;
    for counter in ["not a number", "4503599627370497", "9223372036854775807"] {
        world.0.command(&["SET", "lh1:fence", counter]).await;
        let tried = store.try_acquire(&mine).await.expect_err("no fence");
        assert_eq!(tried.kind(), StoreErrorKind::FenceUnusable, "{counter}: {tried}");
        assert_eq!(store.holder(&mine.name).await, Ok(None), "{counter}");
        let asked = store.acquire(&mine, None).await.expect_err("no fence");
        assert_eq!(asked.kind(), StoreErrorKind::FenceUnusable, "{counter}: {asked}");
        assert_eq!(store.holder(&mine.name).await, Ok(None), "{counter}");
        // A new process can still connect, because held locks must be renewed and released.
        world.store().await;
    }
    assert_eq!(store.release(&holder.name, &holder.token).await, Ok(Release::Released));
    assert_eq!(store.holder(&holder.name).await, Ok(None));
}

#[tokio::test]
async fn full_memory_refuses_grants_and_nothing_else() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let mut pushes = store.pushes();
    let (holder, waiter, newcomer) = (claim("a"), claim("a"), claim("a"));
    let fence = takes(&store, &holder).await.fence;
    queues(&store, &waiter).await;
    world.0.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = store.try_acquire(&claim("b")).await.expect_err("no memory");
    assert_eq!(refused.kind(), StoreErrorKind::OutOfMemory, "{refused}");
    let refused = store.acquire(&newcomer, None).await.expect_err("no memory");
    assert_eq!(refused.kind(), StoreErrorKind::OutOfMemory, "{refused}");
    let rewrite = leasehold::store::Renewal { rewrite: Some(holder.owner.clone()), ..renewal(&holder, fence) };
    assert_eq!(store.renew(&[rewrite]).await, [Renewed::Renewed]);
    assert_eq!(store.release(&holder.name, &holder.token).await, Ok(Release::Released));
    let grant = is_granted(&mut pushes, &waiter).await;
    assert!(grant.fence > fence);
    assert_eq!(store.renew(&[renewal(&waiter, grant.fence)]).await, [Renewed::Renewed]);
    let id = waiter.token.holder_id();
    assert!(matches!(store.evict(&waiter.name, id, EvictMode::Revoke).await, Ok(Evicted::Done(_))));
    assert_eq!(store.release(&waiter.name, &waiter.token).await, Ok(Release::Released));
    // Reconnecting is not rejected either.
    world.store().await;
}

#[tokio::test]
async fn an_emergency_release_needs_no_script() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let (mine, waiter) = (claim("a"), claim("a"));
    takes(&store, &mine).await;
    queues(&store, &waiter).await;
    world.0.command(&["CONFIG", "RESETSTAT"]).await;
    assert_eq!(store.release_emergency(&mine.name, &mine.token).await, Ok(Release::Released));
    let stats = world.0.commandstats().await;
    assert!(!stats.contains_key("evalsha") && !stats.contains_key("eval"), "{stats:?}");
    assert_eq!(store.holder(&mine.name).await, Ok(None));
    assert_eq!(store.release_emergency(&mine.name, &mine.token).await, Ok(Release::NotOwner));
    // There was no hand-off; a waiter finds the free lock with its next request.
    acquires(&store, &waiter).await;
}

#[tokio::test]
async fn a_removed_expiry_comes_back() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let mine = claim("a");
    let fence = takes(&store, &mine).await.fence;
    world.0.command(&["PERSIST", KEY]).await;
    queues(&store, &claim("a")).await;
    assert!(number(&world, &["PTTL", KEY]).await > 20_000, "a waiter sets it again");
    world.0.command(&["PERSIST", KEY]).await;
    assert_eq!(store.renew(&[renewal(&mine, fence)]).await, [Renewed::Renewed]);
    assert!(number(&world, &["PTTL", KEY]).await > 20_000, "a renewal sets it again");
}

#[tokio::test]
async fn a_late_grant_is_reported() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let short = AcquireRequest { ttl: ttl(Duration::from_millis(100)), ..claim("a") };
    let asleep = world.0.command(&["DEBUG", "SLEEP", "0.4"]);
    let tried = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        store.try_acquire(&short).await
    };
    let (_, tried) = tokio::join!(asleep, tried);
    let Ok(Try::Granted(grant)) = tried else { panic!("{tried:?}") };
    assert!(grant.asked_at + grant.lasts < Moment::now());
}

#[tokio::test]
async fn a_pushed_grant_counts_from_before_it_was_given() {
    let world = RedisHere::start().await;
    let (here, there) = (world.open().await, world.store().await);
    let mut pushes = there.pushes();
    for _ in 0..20 {
        let (holder, waiter) = (claim("a"), claim("a"));
        takes(&*here, &holder).await;
        queues(&there, &waiter).await;
        let before = Moment::now();
        tokio::time::sleep(Duration::from_millis(5)).await;
        here.release(&holder.name, &holder.token).await.expect("an answer");
        let grant = is_granted(&mut pushes, &waiter).await;
        // There were no requests since, so the timestamp is that of the request.
        assert!(grant.asked_at <= before, "{:?} after {before:?}", grant.asked_at);
        assert!(before.until(Moment::now()) < LONG && grant.asked_at.until(before) < Duration::from_secs(1));
        there.release(&waiter.name, &waiter.token).await.expect("an answer");
    }
}

#[tokio::test]
async fn cursors_and_names_that_make_no_sense_are_refused() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    for cursor in ["", "9.0", "0", "x", "leasehold"] {
        let refused = store.list("", Some(Cursor::from_text(cursor)), 10).await.expect_err(cursor);
        assert_eq!(refused.kind(), StoreErrorKind::Refused);
    }
    let keys = KeySpace::new(Namespace::new("").expect("empty"), vec![]).expect("valid");
    let bare = RedisStore::connect(&world.0.url(), keys, RedisOptions::default()).await.expect("up");
    let refused = bare.try_acquire(&claim("lh1:fence")).await.expect_err("reserved");
    assert_eq!(refused.kind(), StoreErrorKind::Refused);
    assert!(matches!(&bare.renew(&[renewal(&claim("lh1:fence"), None)]).await[..], [Renewed::Unknown(_)]));
    // The fence counter is a string like a lock, but it is not listed.
    takes(&bare, &claim("order:1")).await;
    let page = bare.list("", None, 10).await.expect("a page");
    assert_eq!(page.locks.iter().map(|(n, _)| n.clone()).collect::<Vec<_>>(), [name("order:1")]);
}

#[tokio::test]
async fn a_try_is_three_plain_commands_and_a_release_one_script() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let mine = claim("a");
    world.0.command(&["CONFIG", "RESETSTAT"]).await;
    takes(&store, &mine).await;
    store.release(&mine.name, &mine.token).await.expect("an answer");
    let mut stats = world.0.commandstats().await;
    // The push probe after connecting may be in the count; the commands of the test kit are.
    for other in ["spublish", "hello", "config|resetstat", "info"] {
        stats.remove(other);
    }
    let expected = [("del", 1), ("evalsha", 1), ("exists", 1), ("get", 1), ("incr", 1), ("set", 1)];
    assert_eq!(stats.into_iter().collect::<Vec<_>>(), expected.map(|(c, n)| (c.to_owned(), n)));
    assert_eq!(world.0.command(&["EXISTS", KEY]).await, Value::Int(0));
    assert!(matches!(store.acquire(&mine, None).await, Ok(Acquire::Granted(_))));
}

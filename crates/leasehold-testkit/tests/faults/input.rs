//! Extreme names, ttls and owners, and values of other types at leasehold's keys.

use std::time::{Duration, Instant};

use leasehold::inspect::{EvictMode, Evicted};
use leasehold::lease::{Token, Ttl};
use leasehold::store::StoreErrorKind;
use leasehold::{Error, LockManager, LockRequest};
use leasehold_testkit::{Arena, Kind, RedisServer, full_or, report};
use redis::Value;

use crate::common::*;

/// SplitMix64, so that a failure can be repeated.
struct Dice(u64);

impl Dice {
    fn new() -> Self {
        let given = std::env::var("LEASEHOLD_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = given.unwrap_or_else(leasehold_testkit::history::now_ns);
        println!("LEASEHOLD_SEED={seed}");
        Self(seed)
    }

    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % sides as u64).expect("less than sides")
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.roll(all.len())].clone()
    }

    /// Returns a text of problematic characters with a length near a bound.
    fn text(&mut self, max: usize) -> String {
        const PIECES: [&str; 24] = [
            "a",
            "{",
            "}",
            "{}",
            ":",
            "*",
            " ",
            "lh1:",
            "lh1 0 ",
            "gpu_lock:",
            "leasehold:lock:",
            "\0",
            "\n",
            "\r\n",
            "\u{7f}",
            "\u{85}",
            "\u{1b}[2J",
            "\u{202e}",
            "\u{feff}",
            "ß",
            "漢",
            "😀",
            "'; DROP TABLE locks;--",
            "%s",
        ];
        let length = self.of(&[0, 1, 2, 20, max - 1, max, max + 1, max * 8]);
        let mut text = String::new();
        let plain = self.roll(3) > 0;
        while text.len() < length {
            text += if plain && self.roll(8) > 0 { "x" } else { self.of(&PIECES) };
        }
        text
    }

    fn duration(&mut self) -> Duration {
        let edge = self.of(&[Duration::ZERO, Ttl::MIN, Ttl::MAX, Duration::from_secs(2), Duration::MAX]);
        let step =
            self.of(&[Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(1), Duration::from_secs(1)]);
        if self.roll(2) == 0 { edge.saturating_add(step) } else { edge.saturating_sub(step) }
    }
}

/// Creates a request, and returns it with its description and whether it is valid.
fn draw(dice: &mut Dice, manager: &LockManager) -> (LockRequest, String, bool) {
    let allowed = |text: &str, max: usize| !text.is_empty() && text.len() <= max && !text.chars().any(char::is_control);
    let name = dice.text(512);
    let mut valid = allowed(&name, 512);
    let mut request = manager.lock(name.as_str()).ttl(TTL).no_wait();
    if dice.roll(2) == 0 {
        let ttl = dice.duration();
        valid &= (Ttl::MIN..=Ttl::MAX).contains(&ttl) && ttl.subsec_nanos().is_multiple_of(1_000_000);
        request = request.ttl(ttl);
    }
    if dice.roll(2) == 0 {
        let owner = dice.text(256);
        valid &= allowed(&owner, 256);
        request = request.owner(owner);
    }
    // All of these are valid: the lock is free, and a wait ends at once.
    request = match dice.roll(5) {
        0 => request.wait_up_to(dice.duration()),
        1 => request.max_hold(dice.duration()),
        2 => request.retry_every(dice.duration()),
        3 => request.unfenced(),
        _ => request.renew(false),
    };
    (request, name, valid)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f36_extreme_input_is_refused_before_anything_is_written() {
    let cases = full_or(1_000, 33_334);
    let mut dice = Dice::new();
    let (mut granted, mut refused) = (0, 0);
    for kind in [Kind::Memory, Kind::Sqlite, Kind::Redis] {
        let arena = Arena::new(kind).await;
        let manager = arena.manager().await;
        for case in 0..cases {
            let (request, name, valid) = draw(&mut dice, &manager);
            let before =
                if valid || kind != Kind::Redis || case % 16 > 0 { None } else { Some(writes(arena.server()).await) };
            match request.await {
                Ok(guard) => {
                    assert!(valid, "{name:?} was taken");
                    assert_eq!(guard.name().as_str(), name);
                    let seen = manager.holder(name.as_str()).await.expect("answered");
                    // The shortest leases may have ended.
                    assert!(seen.is_none_or(|holder| holder.id == guard.holder_id()), "{name:?}");
                    guard.release().await.expect("answered");
                    granted += 1;
                }
                Err(Error::Invalid(invalid)) => {
                    assert!(!valid, "{name:?}: {invalid}");
                    let text = invalid.to_string();
                    assert!(!text.chars().any(char::is_control) && text.len() < 1_000, "{text:?}");
                    refused += 1;
                }
                Err(other) => panic!("{name:?}: {other}"),
            }
            if let Some(before) = before {
                assert_eq!(writes(arena.server()).await, before, "something was written for {name:?}");
            }
            // All other calls with a name or text handle it too.
            if case % 8 == 0 {
                let text = dice.text(512);
                let _ = manager.info(text.as_str()).await;
                let _ = manager.list(&text, None, dice.of(&[0, 1, usize::MAX])).await;
                if let Ok(lease) = manager.lease(text.as_str(), &Token::random()) {
                    let _ = lease.release_without_event().await;
                }
                let _ = manager.list("", Some(leasehold::inspect::Cursor::from_text(text)), 5).await;
            }
        }
        assert_no_locks_left(&manager).await;
    }
    report(
        "F36",
        format!("{} inputs: {granted} granted, {refused} refused and nothing written, 0 panics", granted + refused),
    );
}

async fn writes(server: &RedisServer) -> u64 {
    let stats = server.commandstats().await;
    ["set", "evalsha", "eval", "incr"].iter().filter_map(|name| stats.get(*name)).sum()
}

/// Stores a value of some type at a key.
async fn put(server: &RedisServer, key: &str, how: &[&str]) {
    let command: Vec<&str> = how.iter().map(|part| if *part == "KEY" { key } else { *part }).collect();
    let answer = server.command(&command).await;
    assert!(!matches!(answer, Value::ServerError(_)), "{command:?}: {answer:?}");
}

const WRONG: [&[&str]; 9] = [
    &["RPUSH", "KEY", "a", "b"],
    &["HSET", "KEY", "a", "b"],
    &["SADD", "KEY", "a", "b"],
    &["ZADD", "KEY", "1", "no entry of ours"],
    &["XADD", "KEY", "*", "a", "b"],
    &["SET", "KEY", ""],
    &["SET", "KEY", "9007199254740993"],
    &["SET", "KEY", "lh1 0 not quite ours"],
    &["SET", "KEY", "lh1 0 \u{1b}[2J\r\n"],
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f36_values_of_other_types_are_reported_and_not_changed() {
    let server = RedisServer::start().await;
    let listens = connect(&server.url()).await;
    let mut polling = options();
    polling.notifications = false;
    let polls = LockManager::connect_with(&server.url(), polling).await.expect("a manager");
    let mut cases = 0;
    for round in 0..full_or(1, 20) {
        for (i, how) in WRONG.iter().enumerate() {
            for (k, place) in ["leasehold:lock:", "lh1:queue:leasehold:lock:", "lh1:polls:leasehold:lock:", "lh1:fence"]
                .into_iter()
                .enumerate()
            {
                let name = format!("odd-{round}-{i}-{k}");
                let key = if place == "lh1:fence" { place.to_owned() } else { format!("{place}{name}") };
                server.command(&["DEL", &key]).await;
                put(&server, &key, how).await;
                let was = server.command(&["DUMP", &key]).await;
                for manager in [&listens, &polls] {
                    calls_are_typed(manager, &name, &format!("{how:?} at {key}")).await;
                    cases += 6;
                }
                let now = server.command(&["DUMP", &key]).await;
                let right = match k {
                    // It begins like a record of leasehold: a waiter sets its flag and changes nothing else.
                    0 if how[2].starts_with("lh1 ") => {
                        let flagged = how[2].replacen("lh1 0", "lh1 1", 1);
                        server.command(&["GET", &key]).await == Value::BulkString(flagged.into())
                    }
                    // Queues and marks are used; a counter counts.
                    1 => how[0] == "ZADD",
                    2 => how[0] == "HSET",
                    3 => how[2].parse::<u64>().is_ok(),
                    _ => false,
                };
                assert!(right || now == was, "{how:?} at {key} was changed");
                server.command(&["DEL", &key]).await;
                let began = Instant::now();
                while server.command(&["EXISTS", &format!("leasehold:lock:{name}")]).await != Value::Int(0) {
                    assert!(began.elapsed() < GONE_WITHIN, "{how:?} at {key}: a lock stays behind");
                    tokio::time::sleep(ms(5)).await;
                }
            }
        }
    }
    report("F36", format!("{cases} calls on values of other types: all typed or answered, values untouched, 0 panics"));
}

/// Checks that every call succeeds or fails with the right kind of error.
async fn calls_are_typed(manager: &LockManager, name: &str, what: &str) {
    let typed = |error: &Error| {
        let Error::Store { source, .. } = error else {
            return matches!(error, Error::NotAcquired { .. } | Error::Lost { .. });
        };
        matches!(source.kind(), StoreErrorKind::WrongType | StoreErrorKind::FenceUnusable)
    };
    let check = |call: &str, outcome: Result<(), Error>| {
        if let Err(error) = outcome {
            assert!(typed(&error), "{what}: {call}: {error}");
        }
    };
    let ttl = ms(10_000);
    let release = async |guard: leasehold::Guard| guard.release().await.map(drop);
    let taken = match manager.lock(name).ttl(ttl).no_wait().await {
        Ok(guard) => release(guard).await,
        Err(error) => Err(error),
    };
    check("try", taken);
    let waited = match manager.lock(name).ttl(ttl).wait_up_to(ms(20)).await {
        Ok(guard) => release(guard).await,
        Err(error) => Err(error),
    };
    check("wait", waited);
    check("look", manager.info(name).await.map(drop));
    check(
        "release",
        manager
            .lease(name, &Token::random())
            .expect("a name")
            .release_without_event()
            .await
            .map(|released| assert!(!released)),
    );
    check(
        "renew",
        manager
            .lease(name, &Token::random())
            .expect("a name")
            .renew(Ttl::default())
            .await
            .map(|_| panic!("{what}: renewed")),
    );
    let stranger = Token::random().holder_id();
    let evicted = manager.evict(name, stranger, EvictMode::Revoke, "").await;
    check("evict", evicted.map(|outcome| assert!(!matches!(outcome, Evicted::Done(_)), "{what}: {outcome:?}")));
}

/// An empty value at a lock's key is a foreign holder, like any other value of another client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_value_at_a_lock_is_a_foreign_holder() {
    let server = RedisServer::start().await;
    let manager = connect(&server.url()).await;
    server.command(&["SET", "leasehold:lock:empty", ""]).await;
    let began = Instant::now();
    let refused = manager.lock("empty").no_wait().await.expect_err("held");
    let Error::NotAcquired { holder, .. } = &refused else { panic!("{refused}") };
    assert!(holder.as_ref().is_some_and(|holder| holder.foreign), "{refused:?}");
    let refused = manager.lock("empty").no_wait().under_token(&Token::random()).await.expect_err("held");
    assert!(matches!(refused, Error::NotAcquired { .. }), "{refused}");
    assert!(began.elapsed() < ms(1_000), "{:?}", began.elapsed());
}

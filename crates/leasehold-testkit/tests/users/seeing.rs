//! Inspection of a whole store: an overview of its locks, and the checkup.

use std::time::Duration;

use leasehold::inspect::{Finding, Level};
use leasehold::{LockManager, Options};
use leasehold_testkit::{Arena, Kind, RedisServer, on_every_store};
use tokio::time::timeout;

/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(an_overview_has_every_lock_and_its_queue, a_checkup_of_a_sound_store_finds_nothing_bad);

async fn an_overview_has_every_lock_and_its_queue(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let mut guards = Vec::new();
    for i in 0..70 {
        guards.push(a.lock(format!("seen:{i:02}")).await.expect("free"));
    }
    guards.push(a.lock("unseen").await.expect("free"));
    let waiting = tokio::spawn(b.lock("seen:07").owner("patient").wait_up_to(LONG).into_future());
    let seen = timeout(LONG, async {
        loop {
            let seen = a.overview("seen:").await.expect("answered");
            if seen.iter().any(|lock| !lock.waiters.is_empty()) {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await
    .expect("it stands in line");
    let names: Vec<_> = seen.iter().map(|lock| lock.name.as_str().to_owned()).collect();
    assert_eq!(names, (0..70).map(|i| format!("seen:{i:02}")).collect::<Vec<_>>(), "all of them, by name");
    for (lock, guard) in seen.iter().zip(&guards) {
        assert_eq!(lock.holder.as_ref().expect("held").id, guard.holder_id());
        let line: Vec<_> = lock.waiters.iter().map(|waiter| waiter.owner.task()).collect();
        assert_eq!(line, if lock.name.as_str() == "seen:07" { vec!["patient"] } else { vec![] });
    }
    drop(guards);
    drop(timeout(LONG, waiting).await.expect("in time").expect("no panic").expect("its turn"));
}

fn level(findings: &[Finding], check: &str) -> Level {
    findings.iter().find(|finding| finding.check == check).unwrap_or_else(|| panic!("{check}: {findings:?}")).level
}

async fn a_checkup_of_a_sound_store_finds_nothing_bad(arena: Arena) {
    let manager = arena.manager().await;
    let findings = manager.checkup().await;
    assert!(findings.iter().all(|finding| finding.level < Level::Bad), "{findings:?}");
    assert_eq!(level(&findings, "grant"), Level::Ok);
    match arena.kind() {
        Kind::Memory => assert_eq!(level(&findings, "reach"), Level::Warn, "nobody else sees these locks"),
        Kind::Sqlite => assert_eq!(level(&findings, "integrity"), Level::Ok),
        Kind::Redis => assert_eq!(level(&findings, "eviction"), Level::Ok),
    }
    assert!(manager.overview("").await.expect("answered").is_empty(), "the lock it took is given back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkup_names_what_keeps_a_server_from_its_promises() {
    let server = RedisServer::start().await;
    server.command(&["ACL", "SETUSER", "less", "reset", "on", ">pass", "~*", "&*", "+@all"]).await;
    let mut options = Options::default();
    options.journal = None;
    let url = server.url().replace("redis://", "redis://less:pass@");
    let manager = LockManager::connect_with(&url, options).await.expect("a manager");
    assert_eq!(level(&manager.checkup().await, "permissions"), Level::Ok);
    server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await;
    assert_eq!(level(&manager.checkup().await, "eviction"), Level::Warn, "nothing is dropped yet");
    server.command(&["CONFIG", "SET", "maxmemory", "1gb"]).await;
    assert_eq!(level(&manager.checkup().await, "eviction"), Level::Bad);
    server.command(&["ACL", "SETUSER", "less", "-client|kill"]).await;
    assert_eq!(level(&manager.checkup().await, "permissions"), Level::Warn, "done without");
    server.command(&["ACL", "SETUSER", "less", "-zpopmin"]).await;
    let findings = manager.checkup().await;
    assert_eq!(level(&findings, "permissions"), Level::Bad);
    assert!(findings.iter().any(|finding| finding.text.contains("ZPOPMIN")), "{findings:?}");
    server.command(&["ACL", "SETUSER", "less", "-acl", "-info"]).await;
    let findings = manager.checkup().await;
    assert_eq!(level(&findings, "permissions"), Level::Warn, "what cannot be checked is said");
    assert_eq!(level(&findings, "not checked"), Level::Warn);
}

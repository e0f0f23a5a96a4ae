//! Tests of the guide about fences: in SQL, in Redis and over HTTP.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fences::{Accounts, TABLE, WRITE, WRITE_REDIS};
use leasehold::{Fence, LockManager};
use leasehold_testkit::http::{Answer, ask};
use leasehold_testkit::{Arena, Kind, RedisServer, WorkerProcess};
use tokio::net::TcpListener;

const LONG: Duration = Duration::from_secs(20);

/// The guide shows exactly the code that is tested here.
#[test]
fn the_guide_contains_the_tested_code() {
    let guide = include_str!("../../../docs/using-a-fence.md");
    for shown in [TABLE, WRITE, WRITE_REDIS] {
        assert!(guide.contains(shown), "the guide does not show\n{shown}");
    }
}

async fn reported(writer: &mut WorkerProcess, what: &str) -> serde_json::Value {
    let line = writer.wait_for_line(|line| !line[what].is_null(), LONG).await;
    line.unwrap_or_else(|| panic!("not reported: {what}"))[what].clone()
}

/// A holder is stopped for longer than its lease, another one writes, and then the first one resumes: it writes without a check,
/// and the table rejects the write.
async fn a_stale_writer_is_refused(kind: Kind) {
    let arena = Arena::new(kind).await;
    let dir = tempfile::tempdir().expect("a directory");
    let database = dir.path().join("accounts.db");
    let writer = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_writer"));
        WorkerProcess::run(command.arg(arena.url().expect("a store that processes can share")).arg(&database))
    };
    let mut first = writer();
    let old = reported(&mut first, "granted").await.as_u64().expect("a fence");
    first.pause();
    // Its next write, when it resumes.
    first.send_line("100");
    let mut second = writer();
    let new = reported(&mut second, "granted").await.as_u64().expect("a fence");
    assert!(new > old, "fences rise: {old}, then {new}");
    second.send_line("250");
    assert_eq!(reported(&mut second, "written").await, true);

    first.resume();
    assert_eq!(reported(&mut first, "written").await, false, "the old fence was accepted");
    let accounts = Accounts::open(&database).expect("a database");
    assert_eq!(accounts.read(7).expect("a row"), (250, i64::try_from(new).expect("below 2^52")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_writer_is_refused_by_the_table_with_locks_in_sqlite() {
    a_stale_writer_is_refused(Kind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_writer_is_refused_by_the_table_with_locks_in_redis() {
    a_stale_writer_is_refused(Kind::Redis).await;
}

/// Returns the fences of two grants.
async fn two_fences() -> [Fence; 2] {
    let locks = LockManager::connect("memory:").await.expect("a manager");
    let mut fences = Vec::new();
    for _ in 0..2 {
        let guard = locks.lock("account:7").await.expect("free");
        fences.push(guard.fence());
        guard.release().await.expect("answered");
    }
    fences.try_into().expect("two")
}

#[tokio::test]
async fn a_redis_key_refuses_an_old_fence() {
    let [old, new] = two_fences().await;
    let server = RedisServer::start().await;
    let write = async |fence: Fence, balance: &str| {
        let (fence, server) = (fence.get().to_string(), &server);
        server.command(&["EVAL", WRITE_REDIS, "1", "account:7", &fence, balance]).await
    };
    assert_eq!(write(old, "100").await, redis::Value::Int(1));
    assert_eq!(write(new, "250").await, redis::Value::Int(1));
    assert_eq!(write(old, "100").await, redis::Value::Int(0), "the old fence was accepted");
    let balance = server.command(&["HGET", "account:7", "balance"]).await;
    assert_eq!(balance, redis::Value::BulkString(b"250".to_vec()));
}

async fn put(to: SocketAddr, headers: &str, body: &str) -> Answer {
    ask(to, "PUT /accounts/7", &format!("Host: test\r\n{headers}"), body).await
}

async fn serve(database: &Path) -> SocketAddr {
    let routes = fences::routes(database).expect("a database");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

#[tokio::test]
async fn a_service_refuses_an_old_fence() {
    let [old, new] = two_fences().await;
    let dir = tempfile::tempdir().expect("a directory");
    let service = serve(&dir.path().join("accounts.db")).await;
    let fence = |fence: Fence| format!("Lock-Fence: {fence}\r\n");
    assert!(put(service, &fence(old), "100").await.status == 204);
    assert!(put(service, &fence(new), "250").await.status == 204);
    let response = put(service, &fence(old), "100").await;
    assert_eq!(response.code(), (412, "stale_fence".into()));
    let without = put(service, "", "100").await;
    assert_eq!(without.code(), (428, "fence_missing".into()));
    for bad in ["-1", "many", "9999999999999999"] {
        let response = put(service, &format!("Lock-Fence: {bad}\r\n"), "100").await;
        assert_eq!(response.code(), (400, "bad_fence".into()));
    }
    let wrong = put(service, &fence(new), "much").await;
    assert_eq!(wrong.status, 400);
    let read = ask(service, "GET /accounts/7", "Host: test\r\n", "").await;
    assert_eq!(read.body, format!(r#"{{"balance":250,"fence":{new}}}"#));
}

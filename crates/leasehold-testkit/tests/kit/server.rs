use std::path::Path;
use std::time::{Duration, Instant};

use leasehold_testkit::RedisServer;
use redis::Value;
use tokio::time::timeout;

#[tokio::test]
async fn a_server_answers_and_leaves_nothing_behind() {
    let server = RedisServer::start().await;
    assert_eq!(server.command(&["SET", "k", "v"]).await, Value::Okay);
    assert_eq!(server.command(&["GET", "k"]).await, Value::BulkString(b"v".to_vec()));
    assert!(matches!(server.command(&["NONSENSE"]).await, Value::ServerError(_)));

    let process = format!("/proc/{}", server.pid());
    let dir = server.dir().to_path_buf();
    assert!(Path::new(&process).exists());
    assert!(server.log_tail().contains("Ready to accept connections"));
    drop(server);
    assert!(!Path::new(&process).exists(), "the server outlived its value");
    assert!(!dir.exists(), "its directory was left behind");
}

#[tokio::test]
async fn forgets_on_kill_without_persistence_and_remembers_with_it() {
    let forgetful = RedisServer::start().await;
    let durable = RedisServer::with(&["--appendonly", "yes", "--appendfsync", "always"]).await;
    for server in [&forgetful, &durable] {
        server.command(&["SET", "k", "v"]).await;
        let (port, pid) = (server.port(), server.pid());
        server.restart().await;
        assert_eq!(server.port(), port);
        assert_ne!(server.pid(), pid);
    }
    assert_eq!(forgetful.command(&["GET", "k"]).await, Value::Nil);
    assert_eq!(durable.command(&["GET", "k"]).await, Value::BulkString(b"v".to_vec()));
}

#[tokio::test]
async fn a_paused_server_answers_only_when_resumed() {
    let server = RedisServer::start().await;
    server.pause();
    let ping = timeout(Duration::from_millis(100), server.command(&["PING"])).await;
    assert!(ping.is_err(), "a stopped process answered");
    server.resume();
    assert_eq!(server.command(&["PING"]).await, Value::SimpleString("PONG".into()));

    server.pause();
    let started = Instant::now();
    drop(server);
    assert!(started.elapsed() < Duration::from_secs(1), "a paused server is killed all the same");
}

#[tokio::test]
async fn counts_commands_also_inside_scripts() {
    let server = RedisServer::start().await;
    server.command(&["CONFIG", "RESETSTAT"]).await;
    server.command(&["EVAL", "redis.call('get', 'a') return redis.call('get', 'b')", "0"]).await;
    let stats = server.commandstats().await;
    assert_eq!(stats.get("eval"), Some(&1));
    assert_eq!(stats.get("get"), Some(&2));
    assert_eq!(stats.keys().filter(|name| name.starts_with("client")).count(), 0, "{stats:?}");
}

#[tokio::test]
async fn only_scripts_count_as_slowest_script() {
    let server = RedisServer::start().await;
    server.command(&["SLOWLOG", "RESET"]).await;
    server.command(&["DEBUG", "SLEEP", "0.05"]).await;
    assert!(server.slowest_script_us().await < 50_000);
    server.command(&["EVAL", "for i = 1, 1000000 do end", "0"]).await;
    assert!(server.slowest_script_us().await >= leasehold_testkit::server::SLOW_SCRIPT_US);
}

#[tokio::test]
#[should_panic(expected = "the server's log ends")]
async fn a_server_that_will_not_start_shows_its_log() {
    RedisServer::with(&["--no-such-option", "1"]).await;
}

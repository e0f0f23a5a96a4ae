//! The cost of a safe release: SET and our release against SET and a plain DEL, one request at a time.

use std::time::Instant;

use leasehold::LockManager;
use leasehold::lease::Token;
use leasehold_testkit::RedisServer;
use redis::aio::MultiplexedConnection;

use crate::steady::{Apart, Awake};
use crate::{Size, median, row};

const PER_ROUND: usize = 2_000;

pub(crate) async fn run(server: &RedisServer, size: Size) {
    let client = redis::Client::open(server.url()).expect("a URL");
    let mut connection = client.get_multiplexed_async_connection().await.expect("a connection");
    let manager = LockManager::connect(&server.url()).await.expect("a manager");
    let mut ratios = Vec::new();
    // One task, as in the first row of the throughput table.
    let _steady = (Awake::keep(), Apart::keep(server.pid()));
    for _ in 0..size.rounds {
        let began = Instant::now();
        for _ in 0..PER_ROUND {
            set(&mut connection, &Token::random()).await;
            let deleted: i64 =
                redis::cmd("DEL").arg("gpu_lock:0").query_async(&mut connection).await.expect("answered");
            assert_eq!(deleted, 1);
        }
        let plain = began.elapsed();
        let began = Instant::now();
        for _ in 0..PER_ROUND {
            let token = Token::random();
            set(&mut connection, &token).await;
            assert!(
                manager.lease("gpu_lock:0", &token).expect("a name").release_without_event().await.expect("answered")
            );
        }
        ratios.push(began.elapsed().as_secs_f64() / plain.as_secs_f64());
    }
    let ratio = median(ratios);
    row("SET + our release / SET + plain DEL, time", ratio, "≤ 1.2", ratio <= 1.2);
}

/// Writes a lock as another leasehold client would.
async fn set(connection: &mut MultiplexedConnection, token: &Token) {
    let value = format!("lh1 0 {} 0000000000000000 - 0 60000 bench@host:1", token.reveal());
    let mut set = redis::cmd("SET");
    let () = set.arg("gpu_lock:0").arg(value).arg("PX").arg(60_000).query_async(connection).await.expect("answered");
}

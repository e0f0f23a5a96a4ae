//! The time from a release to the wake-up of the next holder, against the least that a message between two clients of
//! the server can take: one hop of a SPUBLISH ping-pong.

use std::sync::Arc;
use std::time::Instant;

use leasehold::{LockManager, Options};
use leasehold_testkit::RedisServer;
use redis::aio::MultiplexedConnection;
use tokio::sync::mpsc;

use crate::{Size, median, row};

pub(crate) async fn run(size: Size) {
    for waiters in [2, 1_000] {
        // A new server, so that the connections of the previous scenario are gone.
        let server = RedisServer::start().await;
        let line = Line::new(&server, waiters).await;
        let mut pair = PingPong::new(&server).await;
        let mut ratios = Vec::new();
        let (mut hops, mut handoffs) = (Vec::new(), Vec::new());
        for _ in 0..size.rounds {
            let hop = pair.p50(size.handoffs / size.rounds).await;
            let handoff = line.p50(size.handoffs / size.rounds).await;
            ratios.push(handoff / hop);
            hops.push(hop * 1e6);
            handoffs.push(handoff * 1e6);
        }
        let ratio = median(ratios);
        println!(
            "hand-off at {waiters} waiters: p50 {:.0} µs; ping-pong {:.0} µs a hop",
            median(handoffs),
            median(hops)
        );
        row(&format!("hand-off p50 / ping-pong hop, {waiters} waiters"), ratio, "≤ 1.4", ratio <= 1.4);
    }
}

/// Measures one queue alone, for a profiler.
pub(crate) async fn only(server: &RedisServer, waiters: usize, seconds: f64) {
    let line = Line::new(server, waiters).await;
    let mut pair = PingPong::new(server).await;
    server.command(&["CONFIG", "RESETSTAT"]).await;
    let (began, mut hops, mut handoffs) = (Instant::now(), Vec::new(), Vec::new());
    while began.elapsed().as_secs_f64() < seconds {
        hops.push(pair.p50(100).await * 1e6);
        handoffs.push(line.p50(100).await * 1e6);
    }
    println!("{waiters} waiters: hand-off p50 {:.1} µs, ping-pong {:.1} µs a hop", median(handoffs), median(hops));
}

/// Managers, each with its own connection, that wait in the queue of one lock and queue again after they have held it.
struct Line {
    grants: tokio::sync::Mutex<mpsc::UnboundedReceiver<(leasehold::Guard, Instant)>>,
    again: Vec<mpsc::UnboundedSender<()>>,
    looker: LockManager,
    connection: MultiplexedConnection,
}

/// The queue of the lock `line`.
const QUEUE: &str = "lh1:queue:leasehold:lock:line";

impl Line {
    async fn new(server: &RedisServer, waiters: usize) -> Self {
        let (grant, grants) = mpsc::unbounded_channel();
        let mut again = Vec::new();
        for i in 0..waiters {
            let mut options = Options::default();
            options.journal = None;
            let manager = LockManager::connect_with(&server.url(), options).await.expect("a manager");
            let (ask, mut asks) = mpsc::unbounded_channel();
            let grant = grant.clone();
            tokio::spawn(async move {
                while asks.recv().await.is_some() {
                    // The server of this scenario stops before its waiters do.
                    let Ok(guard) = manager.lock("line").owner(i.to_string()).await else { return };
                    let _ = grant.send((guard, Instant::now()));
                }
            });
            again.push(ask);
        }
        let looker = LockManager::connect(&server.url()).await.expect("a manager");
        for ask in &again {
            ask.send(()).expect("the task runs");
        }
        let client = redis::Client::open(server.url()).expect("a URL");
        let connection = client.get_multiplexed_async_connection().await.expect("a connection");
        let line = Self { grants: tokio::sync::Mutex::new(grants), again, looker, connection };
        line.all_wait(1).await;
        line
    }

    /// Waits until all but the holders are in the queue. A task that is still joining would compete with the hand-off for
    /// the processor. It does not sleep, so that server and processor are as active as in the ping-pong.
    async fn all_wait(&self, holders: usize) {
        let mut connection = self.connection.clone();
        loop {
            let waiting: usize = redis::cmd("ZCARD").arg(QUEUE).query_async(&mut connection).await.expect("answered");
            if waiting >= self.again.len() - holders {
                return;
            }
        }
    }

    async fn p50(&self, handoffs: usize) -> f64 {
        let mut grants = self.grants.lock().await;
        let (mut guard, _) = grants.recv().await.expect("a holder");
        let mut times = Vec::new();
        for _ in 0..handoffs {
            let who: usize = self
                .looker
                .holder("line")
                .await
                .expect("answered")
                .expect("held")
                .owner
                .task()
                .parse()
                .expect("a number");
            let released = Instant::now();
            let releasing = tokio::spawn(guard.release());
            let (next, entered) = grants.recv().await.expect("a next holder");
            times.push((entered - released).as_secs_f64());
            assert!(releasing.await.expect("no panic").expect("answered"));
            self.again[who].send(()).expect("the task runs");
            self.all_wait(1).await;
            guard = next;
        }
        let who: usize =
            self.looker.holder("line").await.expect("answered").expect("held").owner.task().parse().expect("a number");
        // The next waiter holds the lock until the next round begins.
        drop(grants);
        drop(guard);
        self.again[who].send(()).expect("the task runs");
        median(times)
    }
}

/// Two connections, each subscribed to a channel of its own, that publish to each other in turn.
struct PingPong {
    sides: [Side; 2],
}

struct Side {
    connection: MultiplexedConnection,
    pushes: mpsc::UnboundedReceiver<Instant>,
    channel: Arc<str>,
}

impl PingPong {
    async fn new(server: &RedisServer) -> Self {
        Self { sides: [Side::new(server, "bench:ping").await, Side::new(server, "bench:pong").await] }
    }

    async fn p50(&mut self, hops: usize) -> f64 {
        let mut times = Vec::new();
        for hop in 0..hops {
            let to = self.sides[(hop + 1) % 2].channel.clone();
            let mut connection = self.sides[hop % 2].connection.clone();
            let sent = Instant::now();
            let publishing = tokio::spawn(async move {
                let receivers: i64 =
                    redis::cmd("SPUBLISH").arg(&*to).arg("x").query_async(&mut connection).await.expect("answered");
                receivers
            });
            self.sides[(hop + 1) % 2].pushes.recv().await.expect("a push");
            times.push(sent.elapsed().as_secs_f64());
            assert_eq!(publishing.await.expect("no panic"), 1);
        }
        median(times)
    }
}

impl Side {
    async fn new(server: &RedisServer, channel: &str) -> Self {
        let client = redis::Client::open(format!("{}?protocol=resp3", server.url())).expect("a URL");
        let (tell, pushes) = mpsc::unbounded_channel();
        let listen = move |push: redis::PushInfo| {
            if push.kind == redis::PushKind::SMessage {
                return tell.send(Instant::now()).map_err(|_| redis::aio::SendError);
            }
            Ok(())
        };
        let config = redis::AsyncConnectionConfig::new().set_push_sender(listen);
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await.expect("a connection");
        let () = redis::cmd("SSUBSCRIBE").arg(channel).query_async(&mut connection).await.expect("subscribed");
        Self { connection, pushes, channel: channel.into() }
    }
}

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use leasehold_testkit::proxy::on;
use leasehold_testkit::{FaultProxy, RedisServer};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, PushInfo, PushKind, RedisResult, Value};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::timeout;

/// Longer than anything takes by chance.
const SHORT: Duration = Duration::from_millis(150);
/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(5);

/// A server, its proxy, and a RESP3 client of the proxy.
struct Scene {
    client: MultiplexedConnection,
    pushes: UnboundedReceiver<PushInfo>,
    proxy: FaultProxy,
    server: RedisServer,
}

impl Scene {
    async fn set() -> Self {
        let server = RedisServer::start().await;
        let proxy = FaultProxy::in_front_of(&server);
        let (client, pushes) = connect(&proxy).await.expect("a client through an honest proxy");
        Self { client, pushes, proxy, server }
    }

    async fn send(&mut self, parts: &[&str]) -> RedisResult<Value> {
        send(&mut self.client, parts).await
    }

    async fn timed(&mut self, parts: &[&str]) -> Duration {
        let started = Instant::now();
        self.send(parts).await.expect("an answer");
        started.elapsed()
    }

    /// Waits for the next published message and returns it as text.
    async fn message(&mut self, within: Duration) -> Option<String> {
        let next = async {
            loop {
                let push = self.pushes.recv().await?;
                if matches!(push.kind, PushKind::Message | PushKind::SMessage | PushKind::PMessage) {
                    return redis::from_redis_value_ref(push.data.last()?).ok();
                }
            }
        };
        timeout(within, next).await.ok().flatten()
    }

    async fn server_value(&self, key: &str) -> Value {
        self.server.command(&["GET", key]).await
    }
}

async fn connect(proxy: &FaultProxy) -> RedisResult<(MultiplexedConnection, UnboundedReceiver<PushInfo>)> {
    let (sender, pushes) = unbounded_channel();
    let config = AsyncConnectionConfig::new().set_push_sender(sender).set_response_timeout(Some(LONG));
    let client = redis::Client::open(format!("{}/?protocol=resp3", proxy.url()))?;
    Ok((client.get_multiplexed_async_connection_with_config(&config).await?, pushes))
}

async fn send(client: &mut MultiplexedConnection, parts: &[&str]) -> RedisResult<Value> {
    let mut command = redis::Cmd::new();
    for part in parts {
        command.arg(part);
    }
    command.query_async(client).await
}

fn text(value: &str) -> Value {
    Value::BulkString(value.as_bytes().to_vec())
}

#[tokio::test]
async fn without_faults_everything_passes() {
    let mut scene = Scene::set().await;
    let mut pipeline = redis::pipe();
    for number in 0..1000 {
        pipeline.cmd("SET").arg(number).arg("x".repeat(number)).ignore();
    }
    pipeline.cmd("GET").arg(999);
    let answers: Vec<String> = pipeline.query_async(&mut scene.client).await.expect("a long pipeline");
    assert_eq!(answers, ["x".repeat(999)]);

    let script = "return {KEYS[1], {ARGV[1], 7}}";
    let Ok(Value::BulkString(sha)) = scene.send(&["SCRIPT", "LOAD", script]).await else {
        panic!("no hash for the script");
    };
    let sha = String::from_utf8(sha).expect("a hash in hex");
    let nested = scene.send(&["EVALSHA", &sha, "1", "k", "a"]).await;
    let inner = Value::Array(vec![text("a"), Value::Int(7)]);
    assert_eq!(nested, Ok(Value::Array(vec![text("k"), inner])));
    assert!(scene.send(&["NONSENSE"]).await.is_err());
    assert!(matches!(scene.send(&["CONFIG", "GET", "*"]).await, Ok(Value::Map(_))));

    assert_eq!(scene.proxy.commands_seen("set"), 1000);
    assert_eq!(scene.proxy.commands_seen("EVALSHA"), 1);
    assert_eq!(scene.proxy.connections_made(), 1);
    assert_eq!(scene.proxy.connections_open(), 1);
}

#[tokio::test]
async fn replies_match_commands_around_subscriptions() {
    let mut scene = Scene::set().await;
    // These are answered only by pushes. The reply that is held behind them must be the right one.
    // Only these methods of the client handle several confirmations of one command.
    let client = &mut scene.client;
    client.subscribe(&["a", "b"]).await.expect("two confirmations");
    client.psubscribe("p*").await.expect("one confirmation");
    scene.send(&["SSUBSCRIBE", "s"]).await.expect("one confirmation");
    let rule = scene.proxy.hold_reply_to(on("ECHO"), SHORT);
    assert_eq!(scene.send(&["ECHO", "one"]).await, Ok(text("one")));
    assert_eq!(rule.hits(), 1);
    let client = &mut scene.client;
    let all: [&str; 0] = [];
    client.unsubscribe(&all).await.expect("two confirmations");
    client.unsubscribe(&all).await.expect("one confirmation of nothing");
    client.punsubscribe("p*").await.expect("one confirmation");
    scene.send(&["SUNSUBSCRIBE", "s"]).await.expect("one confirmation");
    assert!(scene.timed(&["ECHO", "two"]).await >= SHORT);
    assert!(scene.timed(&["PING"]).await < SHORT, "only the matching reply is held");
    assert_eq!(rule.hits(), 2);

    rule.remove();
    assert!(scene.timed(&["ECHO", "three"]).await < SHORT);
}

#[tokio::test]
async fn resp2_subscribers_are_followed_too() {
    let scene = Scene::set().await;
    let client = redis::Client::open(scene.proxy.url()).expect("a url");
    let mut connection = client.get_connection().expect("a blocking RESP2 connection");
    connection.set_read_timeout(Some(LONG)).expect("a read timeout");
    let mut subscriber = connection.as_pubsub();
    subscriber.subscribe("news").expect("a confirmation");
    scene.proxy.mute_pushes(true);
    scene.server.command(&["PUBLISH", "news", "unheard"]).await;
    // One round trip after the message: it would have passed the proxy by now.
    subscriber.subscribe("more").expect("a confirmation");
    scene.proxy.mute_pushes(false);
    scene.server.command(&["PUBLISH", "news", "heard"]).await;
    let message = subscriber.get_message().expect("a message");
    assert_eq!(message.get_payload::<String>(), Ok("heard".into()));
}

#[tokio::test]
async fn every_confirmation_is_counted() {
    let scene = Scene::set().await;
    let rule = scene.proxy.swallow_reply_to(on("ECHO"), 1);
    let mut stream = TcpStream::connect(("127.0.0.1", scene.proxy.port())).expect("a bare connection");
    stream.set_read_timeout(Some(LONG)).expect("a read timeout");
    // In RESP2 a confirmation looks like any reply. With a wrong count, a confirmation would be dropped instead.
    stream.write_all(b"SUBSCRIBE a b\r\nUNSUBSCRIBE\r\nECHO x\r\n").expect("sent");
    timeout(LONG, rule.wait_for_hits(1)).await.expect("the fault happens");
    stream.shutdown(Shutdown::Write).expect("half closed");
    let mut heard = String::new();
    stream.read_to_string(&mut heard).expect("all until the server closes");
    assert_eq!(heard.matches("*3\r\n").count(), 4, "{heard}");
    assert_eq!(heard.matches("unsubscribe").count(), 2, "{heard}");
    assert!(!heard.contains("x\r\n"), "{heard}");
}

#[tokio::test]
async fn replies_and_commands_can_be_delayed() {
    let mut scene = Scene::set().await;
    assert!(scene.timed(&["PING"]).await < SHORT);
    scene.proxy.delay_replies(SHORT);
    let (proxied, direct) = tokio::join!(send(&mut scene.client, &["SET", "k", "1"]), async {
        tokio::time::sleep(SHORT / 2).await;
        scene.server.command(&["GET", "k"]).await
    });
    assert_eq!((proxied, direct), (Ok(Value::Okay), text("1")), "done at once, answered late");

    scene.proxy.delay_replies(Duration::ZERO);
    scene.proxy.delay_commands(SHORT);
    let (proxied, direct) = tokio::join!(send(&mut scene.client, &["SET", "k", "2"]), async {
        tokio::time::sleep(SHORT / 2).await;
        scene.server.command(&["GET", "k"]).await
    });
    assert_eq!((proxied, direct), (Ok(Value::Okay), text("1")), "done late");
    assert_eq!(scene.server_value("k").await, text("2"));

    scene.proxy.heal();
    assert!(scene.timed(&["PING"]).await < SHORT);
}

#[tokio::test]
async fn delays_overlap_in_a_pipeline() {
    let mut scene = Scene::set().await;
    scene.proxy.delay_replies(SHORT);
    let mut pipeline = redis::pipe();
    for _ in 0..20 {
        pipeline.cmd("INCR").arg("n");
    }
    let started = Instant::now();
    let answers: Vec<u64> = pipeline.query_async(&mut scene.client).await.expect("answers");
    assert_eq!(answers, (1..=20).collect::<Vec<_>>());
    assert!((SHORT..5 * SHORT).contains(&started.elapsed()), "{:?}", started.elapsed());
}

#[tokio::test]
async fn random_latency_keeps_the_order() {
    let mut scene = Scene::set().await;
    scene.proxy.latency(Duration::from_millis(1)..Duration::from_millis(10));
    let started = Instant::now();
    for number in 1..=20 {
        assert_eq!(scene.send(&["INCR", "n"]).await, Ok(Value::Int(number)));
    }
    assert!(started.elapsed() >= Duration::from_millis(40), "1 ms each way at least");

    let mut pipeline = redis::pipe();
    for number in 0..200 {
        pipeline.cmd("ECHO").arg(number);
    }
    let answers: Vec<u64> = pipeline.query_async(&mut scene.client).await.expect("answers");
    assert_eq!(answers, (0..200).collect::<Vec<_>>());

    scene.proxy.latency(Duration::ZERO..Duration::ZERO);
    assert!(scene.timed(&["PING"]).await < Duration::from_millis(100));
}

#[tokio::test]
async fn after_a_dropped_reply_a_connection_gets_nothing_until_its_reset() {
    let mut scene = Scene::set().await;
    let rule = scene.proxy.swallow_reply_to(on("SET"), 1);
    assert_eq!(scene.send(&["GET", "k"]).await, Ok(Value::Nil), "other commands are answered");

    let mut client = scene.client.clone();
    let lost = tokio::spawn(async move { send(&mut client, &["SET", "k", "v"]).await });
    timeout(LONG, rule.wait_for_hits(1)).await.expect("the fault happens");
    assert_eq!(scene.server_value("k").await, text("v"), "the command was carried out");
    assert!(timeout(SHORT, scene.send(&["PING"])).await.is_err(), "deaf from here on");
    assert!(!lost.is_finished());

    assert_eq!(scene.proxy.reset_all(), 1);
    let lost = timeout(LONG, lost).await.expect("told by the reset").expect("no panic");
    assert!(lost.expect_err("no answer came").is_io_error());

    let (mut client, _pushes) = connect(&scene.proxy).await.expect("a new connection");
    send(&mut client, &["SET", "k", "w"]).await.expect("once only");
    assert_eq!(rule.hits(), 1);
}

#[tokio::test]
async fn cut_after_forwarding_is_done_but_unanswered() {
    let mut scene = Scene::set().await;
    let rule = scene.proxy.cut_after_forwarding(|command| command.arg(0) == Some(b"k"), 1);
    scene.send(&["SET", "other", "v"]).await.expect("not about this key");
    let error = scene.send(&["SET", "k", "v"]).await.expect_err("the connection is cut");
    assert!(error.is_io_error() || error.is_connection_dropped(), "{error:?}");
    rule.wait_for_hits(1).await;
    assert_eq!(scene.server_value("k").await, text("v"));
    assert_eq!(scene.proxy.connections_open(), 0);

    let (mut client, _pushes) = connect(&scene.proxy).await.expect("a new connection");
    send(&mut client, &["SET", "k", "w"]).await.expect("once only");
    assert_eq!(scene.proxy.connections_made(), 2);
}

#[tokio::test]
async fn cut_before_forwarding_is_not_done() {
    let mut scene = Scene::set().await;
    let rule = scene.proxy.cut_before_forwarding(on("set"), 1);
    let error = scene.send(&["SET", "k", "v"]).await.expect_err("the connection is cut");
    assert!(error.is_io_error() || error.is_connection_dropped(), "{error:?}");
    rule.wait_for_hits(1).await;
    assert_eq!(scene.server_value("k").await, Value::Nil);
    assert_eq!(scene.proxy.commands_seen("SET"), 1);

    let (mut client, _pushes) = connect(&scene.proxy).await.expect("a new connection");
    send(&mut client, &["SET", "k", "w"]).await.expect("once only");
}

#[tokio::test]
async fn a_muted_subscriber_misses_messages_and_nothing_else() {
    let mut scene = Scene::set().await;
    scene.send(&["SSUBSCRIBE", "news"]).await.expect("a confirmation");
    scene.server.command(&["SPUBLISH", "news", "first"]).await;
    assert_eq!(scene.message(LONG).await.as_deref(), Some("first"));

    scene.proxy.mute_pushes(true);
    scene.server.command(&["SPUBLISH", "news", "second"]).await;
    scene.send(&["SUBSCRIBE", "more"]).await.expect("confirmations and replies go on");
    scene.send(&["PING"]).await.expect("confirmations and replies go on");
    assert_eq!(scene.message(SHORT).await, None);

    scene.proxy.mute_pushes(false);
    scene.server.command(&["SPUBLISH", "news", "third"]).await;
    assert_eq!(scene.message(LONG).await.as_deref(), Some("third"), "the second is gone for good");
}

#[tokio::test]
async fn a_blackhole_is_silent_and_delivers_late() {
    let mut scene = Scene::set().await;
    scene.send(&["SSUBSCRIBE", "news"]).await.expect("a confirmation");
    scene.proxy.blackhole(true);
    let mut client = scene.client.clone();
    let pending = tokio::spawn(async move { send(&mut client, &["SET", "k", "v"]).await });
    let newcomer = tokio::spawn({
        let proxy = scene.proxy.clone();
        async move { connect(&proxy).await.map(drop) }
    });
    scene.server.command(&["SPUBLISH", "news", "late"]).await;
    assert_eq!(scene.message(SHORT).await, None);
    assert_eq!(scene.server_value("k").await, Value::Nil);
    assert!(!pending.is_finished() && !newcomer.is_finished(), "neither answered nor refused");
    assert_eq!(scene.proxy.connections_made(), 2, "accepted all the same");

    scene.proxy.blackhole(false);
    assert_eq!(pending.await.expect("no panic"), Ok(Value::Okay));
    newcomer.await.expect("no panic").expect("a connection after all");
    assert_eq!(scene.message(LONG).await.as_deref(), Some("late"));
    assert_eq!(scene.server_value("k").await, text("v"));
}

#[tokio::test]
async fn the_death_of_the_server_does_not_pass_a_blackhole() {
    let mut scene = Scene::set().await;
    scene.proxy.blackhole(true);
    scene.server.kill9();
    assert!(timeout(SHORT, scene.send(&["PING"])).await.is_err(), "silence, not an error");
    assert_eq!(scene.proxy.connections_open(), 1);
    scene.proxy.blackhole(false);
    assert!(timeout(LONG, scene.send(&["PING"])).await.expect("told now").is_err());
}

#[tokio::test]
async fn refusing_new_connections_does_not_affect_open_ones() {
    let mut scene = Scene::set().await;
    scene.proxy.refuse(true);
    assert!(connect(&scene.proxy).await.is_err());
    assert_eq!(scene.proxy.connections_made(), 1);
    assert!(scene.proxy.connections_refused() >= 1);
    scene.send(&["PING"]).await.expect("the old connection lives");
    scene.proxy.refuse(false);
    connect(&scene.proxy).await.expect("welcome again");
}

#[tokio::test]
async fn connections_with_subscriptions_can_be_reset_alone() {
    let mut scene = Scene::set().await;
    let (mut plain, _pushes) = connect(&scene.proxy).await.expect("a second connection");
    assert_eq!(scene.proxy.reset_pushing_connections(), 0);
    scene.send(&["SSUBSCRIBE", "news"]).await.expect("a confirmation");
    assert_eq!(scene.proxy.reset_pushing_connections(), 1);
    let told = async {
        while let Some(push) = scene.pushes.recv().await {
            if push.kind == PushKind::Disconnection {
                return;
            }
        }
    };
    timeout(LONG, told).await.expect("the subscriber is told");
    send(&mut plain, &["PING"]).await.expect("the other one lives");
}

#[tokio::test]
async fn ends_are_passed_on_both_ways() {
    let Scene { mut client, pushes, proxy, server } = Scene::set().await;
    send(&mut client, &["PING"]).await.expect("an answer");
    drop((client, pushes));
    let closed = async {
        while proxy.connections_open() > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(LONG, closed).await.expect("a client's end ends the connection");

    let (mut client, _pushes) = connect(&proxy).await.expect("a connection");
    server.kill9();
    assert!(timeout(LONG, send(&mut client, &["PING"])).await.expect("told").is_err());
    assert!(connect(&proxy).await.is_err(), "nobody behind the proxy");
    server.restart().await;
    connect(&proxy).await.expect("the same proxy serves the restarted server");
}

#[test]
fn works_without_a_runtime_and_frees_its_port() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = runtime.block_on(RedisServer::start());
    let proxy = FaultProxy::in_front_of(&server);
    drop(runtime);
    let client = redis::Client::open(proxy.url()).expect("a url");
    let mut connection = client.get_connection().expect("a blocking connection");
    redis::cmd("SET").arg("k").arg("v").exec(&mut connection).expect("an answer");

    let port = proxy.port();
    let other_handle = proxy.clone();
    drop(proxy);
    redis::cmd("PING").exec(&mut connection).expect("alive while a handle is");
    drop(other_handle);
    assert!(redis::cmd("PING").exec(&mut connection).is_err());
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err());
}

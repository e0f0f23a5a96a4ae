//! Our Redis client against two versions of the `redis` crate: round trips, concurrent requests, pushes and new
//! connections. All send the same commands to the same server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::store::redis::BareClient;
use leasehold_testkit::RedisServer;
use tokio::sync::mpsc;

use crate::steady::{Apart, Awake};
use crate::throughput::LEVEL;
use crate::{Size, median, row};

const TASKS: [usize; 3] = [1, 64, 512];
/// Pushes and connections that are measured in one round.
const PUSHES: usize = 300;
const CONNECTIONS: usize = 10;
/// The user that logs in, so that a new connection includes its authentication.
const USER: [&str; 2] = ["bench", "secret"];

#[derive(Clone, Copy)]
enum Kind {
    Ours,
    V1,
    V2,
}

const KINDS: [Kind; 3] = [Kind::Ours, Kind::V1, Kind::V2];

#[derive(Clone)]
enum Client {
    Ours(Arc<BareClient>),
    V1(redis::aio::MultiplexedConnection),
    V2(redis2::aio::MultiplexedConnection),
}

/// Compiles an expression for both versions of the crate: what it uses of them is the same.
macro_rules! on {
    ($client:expr, $ours:ident => $our_code:expr, ($lib:ident, $connection:ident) => $crate_code:expr) => {
        match $client {
            Client::Ours($ours) => $our_code,
            Client::V1($connection) => {
                use redis as $lib;
                $crate_code
            }
            Client::V2($connection) => {
                use redis2 as $lib;
                $crate_code
            }
        }
    };
}

macro_rules! connect_with {
    ($lib:ident, $url:expr, $on_push:expr) => {{
        let (client, on_push) = ($lib::Client::open(format!("{}?protocol=resp3", $url)).expect("a URL"), $on_push);
        let on_push = move |push: $lib::PushInfo| {
            if push.kind == $lib::PushKind::SMessage {
                on_push();
            }
            Ok::<_, $lib::aio::SendError>(())
        };
        let config = $lib::AsyncConnectionConfig::new().set_push_sender(on_push);
        client.get_multiplexed_async_connection_with_config(&config).await.expect("a connection")
    }};
}

macro_rules! command {
    ($lib:ident, $parts:expr) => {{
        let mut command = $lib::cmd($parts[0]);
        command.arg(&$parts[1..]);
        command
    }};
}

pub(crate) async fn run(server: &RedisServer, size: Size) {
    let [user, password] = USER;
    server.command(&["ACL", "SETUSER", user, "on", &format!(">{password}"), "~*", "&*", "+@all"]).await;
    let url = server.url().replace("redis://", &format!("redis://{user}:{password}@"));
    println!();

    let awake = Awake::keep();
    let mut clients = Vec::new();
    for kind in KINDS {
        clients.push(Client::connect(&url, kind, || {}).await);
    }
    // Three numbers of tasks: a quarter of the usual time for each keeps this part short.
    let seconds = size.seconds / 4.0;
    for tasks in TASKS {
        let _apart = (tasks == 1).then(|| Apart::keep(server.pid()));
        let ratios = ratios(size, async |kind| clients[kind as usize].pairs_per_second(tasks, seconds).await).await;
        rows(&format!("SET + GET rate, {tasks} tasks"), ratios, "level", |ratio| ratio >= LEVEL);
    }
    drop(awake);

    let mut pairs = Vec::new();
    for kind in KINDS {
        pairs.push(Pair::new(&url, kind).await);
    }
    let pushes = ratios(size, async |kind| pairs[kind as usize].hop().await).await;
    rows("push latency", pushes, "level", |ratio| ratio <= 1.0 / LEVEL);

    let scripts = scripts();
    let opening = ratios(size, async |kind| open(&url, kind, &scripts).await).await;
    rows("connect, log in, load scripts", opening, "level", |ratio| ratio <= 1.0 / LEVEL);
}

/// The medians over the rounds: our figure divided by that of each version of the crate.
async fn ratios(size: Size, mut measure: impl AsyncFnMut(Kind) -> f64) -> [f64; 2] {
    let mut ratios = [vec![], vec![]];
    for round in 0..size.rounds {
        let mut figures = [0.0; 3];
        for i in 0..3 {
            // Another one is first each time, so that none always has the warm cache.
            let kind = KINDS[(i + round) % 3];
            figures[kind as usize] = measure(kind).await;
        }
        let [ours, crates @ ..] = figures;
        (0..2).for_each(|i| ratios[i].push(ours / crates[i]));
    }
    ratios.map(median)
}

fn rows(what: &str, ratios: [f64; 2], bound: &str, holds: impl Fn(f64) -> bool) {
    for (ratio, version) in ratios.into_iter().zip(crate_versions()) {
        row(&format!("{what}: ours / redis {version}"), ratio, bound, holds(ratio));
    }
}

impl Client {
    async fn connect(url: &str, kind: Kind, on_push: impl Fn() + Send + Sync + 'static) -> Self {
        match kind {
            Kind::Ours => Self::Ours(Arc::new(BareClient::connect(url, on_push).await.expect("a connection"))),
            Kind::V1 => Self::V1(connect_with!(redis, url, on_push)),
            Kind::V2 => Self::V2(connect_with!(redis2, url, on_push)),
        }
    }

    async fn call(&mut self, parts: &[&str]) -> Option<String> {
        on!(self,
            client => client.call(parts).await.expect("answered"),
            (lib, connection) => command!(lib, parts).query_async(connection).await.expect("answered"))
    }

    async fn call_all(&mut self, commands: &[Vec<&str>]) {
        on!(self,
        client => client.call_all(commands).await.expect("answered"),
        (lib, connection) => {
            let mut pipe = lib::pipe();
            for parts in commands {
                pipe.add_command(command!(lib, parts)).ignore();
            }
            let () = pipe.query_async(connection).await.expect("answered");
        })
    }

    async fn subscribe(&mut self, channel: &str) {
        on!(self,
        client => client.subscribe(channel).await.expect("subscribed"),
        (lib, connection) => {
            let () = command!(lib, ["SSUBSCRIBE", channel]).query_async(connection).await.expect("subscribed");
        })
    }

    /// Each task waits for the reply to its request before it sends the next one.
    async fn pairs_per_second(&self, tasks: usize, seconds: f64) -> f64 {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let began = Instant::now();
        let running: Vec<_> = (0..tasks)
            .map(|task| {
                let (mut client, stop, done) = (self.clone(), stop.clone(), done.clone());
                tokio::spawn(async move {
                    let (key, mut pairs) = (format!("bench-client-{task}"), 0);
                    while !stop.load(Ordering::Relaxed) {
                        client.call(&["SET", &key, "a token of a lock", "NX", "PX", "30000"]).await;
                        assert!(client.call(&["GET", &key]).await.is_some(), "set before");
                        pairs += 1;
                    }
                    done.fetch_add(pairs, Ordering::Relaxed);
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        stop.store(true, Ordering::Relaxed);
        for task in running {
            task.await.expect("no panic");
        }
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let pairs = done.load(Ordering::Relaxed) as f64;
        pairs / began.elapsed().as_secs_f64()
    }
}

/// Two connections of one kind, each subscribed to a channel of its own, that publish to each other in turn.
struct Pair {
    sides: [Side; 2],
}

struct Side {
    client: Client,
    pushes: mpsc::UnboundedReceiver<()>,
    channel: String,
}

impl Pair {
    async fn new(url: &str, kind: Kind) -> Self {
        Self { sides: [Side::new(url, kind, 0).await, Side::new(url, kind, 1).await] }
    }

    /// The median time from a publish to the wake-up of the task that waits for the message.
    async fn hop(&mut self) -> f64 {
        let mut times = Vec::new();
        for hop in 0..PUSHES {
            let to = self.sides[(hop + 1) % 2].channel.clone();
            let mut client = self.sides[hop % 2].client.clone();
            let sent = Instant::now();
            let publishing = tokio::spawn(async move { client.call(&["SPUBLISH", &to, "x"]).await });
            self.sides[(hop + 1) % 2].pushes.recv().await.expect("a push");
            times.push(sent.elapsed().as_secs_f64());
            assert_eq!(publishing.await.expect("no panic").as_deref(), Some("1"));
        }
        median(times)
    }
}

impl Side {
    async fn new(url: &str, kind: Kind, number: usize) -> Self {
        let channel = format!("bench:client:{}:{number}", kind as usize);
        let (sender, pushes) = mpsc::unbounded_channel();
        let mut client = Client::connect(url, kind, move || {
            let _ = sender.send(());
        })
        .await;
        client.subscribe(&channel).await;
        Self { client, pushes, channel }
    }
}

/// The median time to open a connection and to load the scripts of a session, in seconds.
async fn open(url: &str, kind: Kind, scripts: &[String]) -> f64 {
    let mut commands = vec![vec!["CLIENT", "SETNAME", "bench"], vec!["CLIENT", "INFO"]];
    commands.extend(scripts.iter().map(|script| vec!["SCRIPT", "LOAD", script]));
    let mut times = Vec::new();
    for _ in 0..CONNECTIONS {
        let began = Instant::now();
        Client::connect(url, kind, || {}).await.call_all(&commands).await;
        times.push(began.elapsed().as_secs_f64());
    }
    median(times)
}

/// The library's scripts, without the head that it adds to some of them.
fn scripts() -> Vec<String> {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/leasehold/src/store/redis/lua");
    let files = std::fs::read_dir(dir).expect("the scripts").map(|file| file.expect("a file").path());
    files.map(|file| std::fs::read_to_string(file).expect("a script")).collect()
}

/// The two versions of the `redis` crate in the lock file.
fn crate_versions() -> [&'static str; 2] {
    let mut versions = include_str!("../Cargo.lock").split("name = \"redis\"\nversion = \"").skip(1);
    [(); 2].map(|()| versions.next().and_then(|rest| rest.split('"').next()).expect("a dependency of this program"))
}

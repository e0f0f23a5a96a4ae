//! Uncontended lock and unlock: the bare pattern (SET NX PX and a compare-and-delete script through the `redis` crate),
//! rslock, and leasehold with and without fences.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::LockManager;
use leasehold_testkit::RedisServer;
use redis::aio::MultiplexedConnection;

use crate::steady::{Apart, Awake};
use crate::{Size, median, row};

const TTL: Duration = Duration::from_secs(30);
const TASKS: [usize; 3] = [1, 64, 512];
/// The required ratios to the bare pattern, by number of tasks.
const FENCED: [f64; 3] = [0.82, 0.65, 0.60];
const UNFENCED: [f64; 3] = [0.90, 0.78, 0.80];
/// Two contenders whose ratio is above this are level: one contender varies by more from run to run.
pub(crate) const LEVEL: f64 = 0.97;

const COMPARE_AND_DELETE: &str =
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end";

#[derive(Clone)]
enum Contender {
    Bare(MultiplexedConnection, Arc<str>),
    Rslock(rslock::LockManager),
    Fenced(LockManager),
    Unfenced(LockManager),
}

impl Contender {
    /// Locks and unlocks a name of its own until `stop` is set.
    async fn run(self, task: usize, stop: Arc<AtomicBool>, done: Arc<AtomicU64>) {
        let name = format!("bench-{task}");
        let mut pairs = 0;
        while !stop.load(Ordering::Relaxed) {
            match &self {
                Self::Bare(connection, sha) => bare_pair(connection.clone(), &name, sha).await,
                Self::Rslock(manager) => {
                    let lock = manager.lock(name.as_str(), TTL).await.expect("free");
                    manager.unlock(&lock).await;
                }
                Self::Fenced(manager) => {
                    assert!(manager.lock(&name).await.expect("free").release().await.expect("answered"));
                }
                Self::Unfenced(manager) => {
                    assert!(manager.lock(&name).unfenced().await.expect("free").release().await.expect("answered"));
                }
            }
            pairs += 1;
        }
        done.fetch_add(pairs, Ordering::Relaxed);
    }

    async fn pairs_per_second(&self, tasks: usize, seconds: f64) -> f64 {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let began = Instant::now();
        let running: Vec<_> =
            (0..tasks).map(|i| tokio::spawn(self.clone().run(i, stop.clone(), done.clone()))).collect();
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

async fn bare_pair(mut connection: MultiplexedConnection, name: &str, sha: &str) {
    let token = leasehold::lease::Token::random();
    let set: Option<String> = redis::cmd("SET")
        .arg(name)
        .arg(token.reveal())
        .arg("NX")
        .arg("PX")
        .arg(30_000)
        .query_async(&mut connection)
        .await
        .expect("answered");
    assert!(set.is_some(), "free");
    let mut release = redis::cmd("EVALSHA");
    release.arg(sha).arg(1).arg(name).arg(token.reveal());
    let released: i64 = release.query_async(&mut connection).await.expect("answered");
    assert_eq!(released, 1);
}

pub(crate) async fn only(server: &RedisServer, contender: &str, tasks: usize, seconds: f64) -> f64 {
    if contender == "memory" {
        // The cost of the library alone, without a server.
        let manager = LockManager::connect("memory:").await.expect("a manager");
        return Contender::Fenced(manager).pairs_per_second(tasks, seconds).await;
    }
    let names = ["bare", "rslock", "fenced", "unfenced"];
    let _steady = (Awake::keep(), (tasks == 1).then(|| Apart::keep(server.pid())));
    let which = names.iter().position(|name| *name == contender).expect("bare, rslock, fenced or unfenced");
    contenders(server).await[which].pairs_per_second(tasks, seconds).await
}

async fn contenders(server: &RedisServer) -> [Contender; 4] {
    let client = redis::Client::open(server.url()).expect("a URL");
    let mut connection = client.get_multiplexed_async_connection().await.expect("a connection");
    let mut load = redis::cmd("SCRIPT");
    let sha: String = load.arg("LOAD").arg(COMPARE_AND_DELETE).query_async(&mut connection).await.expect("loaded");
    let manager = LockManager::connect(&server.url()).await.expect("a manager");
    [
        Contender::Bare(connection, sha.into()),
        Contender::Rslock(rslock::LockManager::new(vec![server.url()])),
        Contender::Fenced(manager.clone()),
        Contender::Unfenced(manager),
    ]
}

pub(crate) async fn run(server: &RedisServer, size: Size) {
    let contenders = contenders(server).await;
    println!("lock + unlock, uncontended           bare/s   rslock   fenced  unfenced   (ratios to bare)");
    let mut table = Vec::new();
    let awake = Awake::keep();
    for (t, tasks) in TASKS.into_iter().enumerate() {
        let _apart = (tasks == 1).then(|| Apart::keep(server.pid()));
        let mut ratios = [vec![], vec![], vec![], vec![]];
        let mut bares = Vec::new();
        for round in 0..size.rounds {
            let mut rates = [0.0; 4];
            for i in 0..4 {
                // Another one is first each time, so that none always has the warm cache.
                let i = (i + round) % 4;
                rates[i] = contenders[i].pairs_per_second(tasks, size.seconds).await;
            }
            bares.push(rates[0]);
            (0..4).for_each(|i| ratios[i].push(rates[i] / rates[0]));
        }
        let [_, rslock, fenced, unfenced] = ratios.map(median);
        println!(
            "  {tasks:>4} tasks                       {:>8.0} {rslock:>8.2} {fenced:>8.2} {unfenced:>8.2}",
            median(bares)
        );
        table.push((t, tasks, rslock, fenced, unfenced));
    }
    drop(awake);
    println!();
    for (t, tasks, rslock, fenced, unfenced) in table {
        row(&format!("fenced / bare, {tasks} tasks"), fenced, &format!("≥ {}", FENCED[t]), fenced >= FENCED[t]);
        row(
            &format!("unfenced / bare, {tasks} tasks"),
            unfenced,
            &format!("≥ {}", UNFENCED[t]),
            unfenced >= UNFENCED[t],
        );
        row(&format!("unfenced / rslock, {tasks} tasks"), unfenced / rslock, "> 1", unfenced > rslock);
        row(&format!("fenced / rslock, {tasks} tasks"), fenced / rslock, "level", fenced >= rslock * LEVEL);
    }
}

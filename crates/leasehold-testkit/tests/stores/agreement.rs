//! The three stores give the same replies to the same requests.
//!
//! Random sequences run on the memory store, on SQLite and on Redis at once. After every step the replies, the pushes to each
//! client, and the holder and queue of every lock must agree.
//!
//! A failure prints the shortest failing sequence and a seed. `LEASEHOLD_AGREEMENT_SEED=<seed>` runs that sequence alone.

use std::cell::{Cell, RefCell};
use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

use leasehold_testkit::{Kind, full_or};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use tokio::runtime::{Builder, Runtime};

mod asking;
mod case;
mod drive;
mod seen;
mod worlds;

use case::{Case, cases};
use drive::{Drive, Stop};
use worlds::World;

const SEED_VAR: &str = "LEASEHOLD_AGREEMENT_SEED";

#[test]
fn the_three_stores_agree_step_by_step() {
    agree(&[Kind::Memory, Kind::Sqlite, Kind::Redis], false, full_or(64, 2_000));
}

#[test]
fn memory_and_redis_agree_about_other_kinds_of_clients() {
    agree(&[Kind::Memory, Kind::Redis], true, full_or(24, 500));
}

/// Runs a number of sequences on stores of these kinds.
fn agree(kinds: &[Kind], foreign: bool, many: u64) {
    let given = std::env::var(SEED_VAR).ok().map(|seed| seed.parse::<u64>().expect("a number"));
    let first = given.unwrap_or_else(|| RandomState::new().hash_one(0));
    let many = if given.is_some() { 1 } else { many };
    let pool = Pool::new(kinds);
    let began = Instant::now();
    for seed in (0..many).map(|n| first.wrapping_add(n)) {
        if let Err(error) = runner(seed).run(&cases(foreign), |case| pool.run(&case)) {
            let TestError::Fail(reason, _) = &error else { panic!("{error}") };
            panic!("{reason}\n{SEED_VAR}={seed} shows it again");
        }
    }
    println!("{many} sequences on {kinds:?}, {} not judged, in {:.1?}", pool.slow.get(), began.elapsed());
    // Sequences that were stopped early check less; too many of them would check nothing.
    assert!(pool.slow.get() * 4 <= many, "{} of {many} took too long to be judged", pool.slow.get());
}

/// Runs one case. The same seed gives the same case.
fn runner(seed: u64) -> TestRunner {
    let config = Config {
        cases: 1,
        failure_persistence: None,
        max_shrink_iters: 4_000,
        max_shrink_time: 120_000,
        ..Config::default()
    };
    let mut bytes = [0_u8; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// The stores, which are reused: every case has names of its own.
struct Pool {
    runtime: Runtime,
    kinds: Vec<Kind>,
    worlds: RefCell<Option<Vec<World>>>,
    slow: Cell<u64>,
}

impl Pool {
    fn new(kinds: &[Kind]) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
        Self { runtime, kinds: kinds.to_vec(), worlds: RefCell::new(None), slow: Cell::new(0) }
    }

    fn run(&self, case: &Case) -> Result<(), TestCaseError> {
        self.runtime.block_on(async {
            // Removed, so that after a failure the next case begins with new stores.
            let mut worlds = match self.worlds.take() {
                Some(worlds) => worlds,
                None => self.open().await,
            };
            match Drive::run(&mut worlds, case).await {
                Ok(()) => {}
                Err(Stop::Slow) => self.slow.set(self.slow.get() + 1),
                Err(Stop::Disagreement(text)) => {
                    let logs: String = worlds.iter().map(World::log).collect();
                    return Err(TestCaseError::fail(text + &logs));
                }
            }
            self.worlds.replace(Some(worlds));
            Ok(())
        })
    }

    async fn open(&self) -> Vec<World> {
        let mut worlds = Vec::new();
        for kind in &self.kinds {
            worlds.push(World::new(*kind).await);
        }
        worlds
    }
}

//! A worker of the demo: a process that acquires locks, holds each for a while and releases it.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::time::Duration;

use leasehold::{Error, Guard, LockManager};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::cli::DemoWorkerArgs;
use crate::exit::{Exit, Failure};
use crate::store::Choice;

/// The number of GPUs of the demo.
pub(super) const GPUS: u32 = 3;
/// Short, so that a hung worker soon loses its lock.
const TTL: Duration = Duration::from_secs(6);

/// The locks that a worker acquires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Workload {
    /// Any GPU that is free.
    Gpu,
    /// Orders, one at a time each.
    Order,
    /// A report that only one may write.
    Report,
    /// A cache that only one may fill.
    Cache,
}

/// Works until the process is killed, at the latest when the demo ends.
pub(crate) async fn work(args: DemoWorkerArgs, store: &Choice) -> Result<Exit, Failure> {
    // End with the demo, even if it was killed before this call.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid().is_none_or(|demo| demo.as_raw_nonzero().get().unsigned_abs() != args.of) {
        return Ok(Exit::Done);
    }
    let mut options = store.options()?;
    options.journal = None;
    let locks = store.connect_with(options).await?;
    loop {
        match acquire(&locks, &args).await {
            Ok((guard, hold)) => {
                tokio::select! {
                    () = tokio::time::sleep(hold) => {}
                    // The lock was revoked, or its lease expired during a hang.
                    _ = guard.lost() => {}
                }
                // Fails if the lock is lost, which needs no release.
                let _ = guard.release().await;
            }
            // The worker lost its queue position in a hang.
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
        tokio::time::sleep(random_within(pause(args.workload))).await;
    }
}

async fn acquire(locks: &LockManager, args: &DemoWorkerArgs) -> Result<(Guard, Duration), Error> {
    let lock = |name: String| locks.lock(name).ttl(TTL).owner(&args.name);
    Ok(match args.workload {
        Workload::Gpu => {
            let permit = locks.pool("gpu_lock", 0..GPUS)?.acquire().ttl(TTL).owner(&args.name).await?;
            (permit.into_guard(), random_within(3_000..9_000))
        }
        Workload::Order => (lock(format!("order:{}", 41 + random(4))).await?, random_within(400..2_500)),
        Workload::Report => (lock("nightly-report".into()).await?, random_within(9_000..16_000)),
        Workload::Cache => (lock("cache:prices".into()).await?, random_within(1_000..3_000)),
    })
}

fn pause(workload: Workload) -> Range<u64> {
    match workload {
        Workload::Gpu | Workload::Report => 200..1_500,
        Workload::Order => 300..2_000,
        Workload::Cache => 2_000..6_000,
    }
}

fn random_within(ms: Range<u64>) -> Duration {
    Duration::from_millis(ms.start + random(ms.end - ms.start))
}

/// Returns a random number below `below`, from the random seed of a hasher.
fn random(below: u64) -> u64 {
    RandomState::new().hash_one(0) % below
}

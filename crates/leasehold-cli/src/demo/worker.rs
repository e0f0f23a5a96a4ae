//! One worker of the demo: a process that takes locks, works under them for a while and gives them back, as
//! real ones do.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::time::Duration;

use leasehold::{Error, Guard, LockManager};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::cli::DemoWorkerArgs;
use crate::exit::{Exit, Failure};
use crate::store::Choice;

/// The GPUs of the demo.
pub(super) const GPUS: u32 = 3;
/// Short, so that a hung worker is seen to lose its lock.
const TTL: Duration = Duration::from_secs(6);

/// What a worker does all day.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Trade {
    /// Any GPU that is free.
    Gpu,
    /// Orders, one at a time each.
    Order,
    /// A report that only one may write.
    Report,
    /// A cache that only one may fill.
    Cache,
}

/// Works until it is killed, at the latest with the demo.
pub(crate) async fn work(args: DemoWorkerArgs, store: &Choice) -> Result<Exit, Failure> {
    // Also when the demo itself is killed, be it a moment before this.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid().is_none_or(|demo| demo.as_raw_nonzero().get().unsigned_abs() != args.of) {
        return Ok(Exit::Done);
    }
    let mut options = store.options()?;
    options.journal = None;
    let locks = store.connect_with(options).await?;
    loop {
        match take(&locks, &args).await {
            Ok((guard, hold)) => {
                tokio::select! {
                    () = tokio::time::sleep(hold) => {}
                    // Taken away, or it has slept through its lease: whoever is next may be at work already.
                    _ = guard.lost() => {}
                }
                // It may not be ours any more, which is the answer then.
                let _ = guard.release().await;
            }
            // Passed over while it hung: it asks again.
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
        tokio::time::sleep(any_of(pause(args.trade))).await;
    }
}

async fn take(locks: &LockManager, args: &DemoWorkerArgs) -> Result<(Guard, Duration), Error> {
    let lock = |name: String| locks.lock(name).ttl(TTL).owner(&args.name);
    Ok(match args.trade {
        Trade::Gpu => {
            let permit = locks.pool("gpu_lock", 0..GPUS)?.acquire().ttl(TTL).owner(&args.name).await?;
            (permit.into_guard(), any_of(3_000..9_000))
        }
        Trade::Order => (lock(format!("order:{}", 41 + any(4))).await?, any_of(400..2_500)),
        Trade::Report => (lock("nightly-report".into()).await?, any_of(9_000..16_000)),
        Trade::Cache => (lock("cache:prices".into()).await?, any_of(1_000..3_000)),
    })
}

fn pause(trade: Trade) -> Range<u64> {
    match trade {
        Trade::Gpu | Trade::Report => 200..1_500,
        Trade::Order => 300..2_000,
        Trade::Cache => 2_000..6_000,
    }
}

fn any_of(ms: Range<u64>) -> Duration {
    Duration::from_millis(ms.start + any(ms.end - ms.start))
}

/// Any number below this: a new hasher is seeded anew.
fn any(below: u64) -> u64 {
    RandomState::new().hash_one(0) % below
}

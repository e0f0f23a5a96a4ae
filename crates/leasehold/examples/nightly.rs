//! A job that runs one at a time on this machine, without a server:
//!
//! ```text
//! cargo run --release --example nightly
//! ```
//!
//! Start it in two terminals: the second process prints the holder, waits, and gets the lock the moment the first is done. Kill
//! the first one (`kill -9`), and the second gets the lock at once.

use std::process::ExitCode;
use std::time::Duration;

use leasehold::{Error, Guard, LockManager};

const NAME: &str = "nightly-report";

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nightly: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Error> {
    // With LEASEHOLD_STORE=redis://… it runs one at a time on many machines.
    let store = std::env::var("LEASEHOLD_STORE").unwrap_or_else(|_| "sqlite:".into());
    let locks = LockManager::connect(&store).await?;
    println!("store      {}", locks.store());

    let request = || locks.lock(NAME).owner("nightly").ttl(Duration::from_secs(10));
    let guard = match request().no_wait().await {
        Err(Error::NotAcquired { holder: Some(holder), .. }) => {
            println!("waiting    {NAME} is held by {}", holder.owner);
            request().await?
        }
        taken => taken?,
    };
    println!("inside     fence {}, lease until released", guard.fence());

    tokio::select! {
        // The work is cancelled before another process can get the lock.
        why = guard.lost() => return Err(Error::Lost { name: guard.name().clone(), why }),
        () = report(&guard) => {}
    }
    guard.release().await?;
    println!("released   the next waiter has the lock now");
    locks.shutdown().await;
    Ok(())
}

/// The job.
async fn report(guard: &Guard) {
    for page in 1..=3 {
        println!("           writing page {page} of 3 (holder {})", guard.holder_id());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

//! A process that claims a request id. Its argument is a `ClaimJob` in JSON; it reports by lines of JSON. Tests kill it.

use std::io::{BufRead, Write};
use std::time::Duration;

use leasehold::bindings::Claimed;
use leasehold::{LockManager, Options};
use leasehold_testkit::job::{ClaimJob, OnceJob};
use serde_json::{Value, json};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let job = std::env::args().nth(1).expect("a job as the first argument");
    let job: ClaimJob = serde_json::from_str(&job).expect("a job in JSON");
    let mut options = Options::default();
    options.journal = None;
    let locks = LockManager::connect_with(&job.url, options).await.expect("a manager");
    report(&json!({ "ready": true }));
    wait_for("go");
    match &job.once {
        Some(work) => once(&locks, &job, work).await,
        None => claim(&locks, &job).await,
    }
    wait_for("end");
}

async fn claim(locks: &LockManager, job: &ClaimJob) {
    let lease = Duration::from_millis(job.lease_ms);
    let mine = std::process::id().to_string();
    match locks.bindings::<String>().try_create(&job.id, &mine, lease).await {
        Ok(Claimed::Created(claim)) => report(&json!({ "created": true, "value": mine, "claim": claim.as_str() })),
        Ok(Claimed::Exists(found)) => {
            report(&json!({ "created": false, "value": found.value, "claim": found.claim.as_str() }));
        }
        Err(error) => report(&json!({ "error": error.to_string() })),
    }
}

async fn once(locks: &LockManager, job: &ClaimJob, work: &OnceJob) {
    let done = locks.once(&job.id).ttl(Duration::from_millis(job.lease_ms)).run(async |_| {
        let line = format!("{}\n", std::process::id());
        let log = std::fs::OpenOptions::new().append(true).create(true).open(&work.log);
        log.and_then(|mut log| log.write_all(line.as_bytes())).expect("the log can be written");
        report(&json!({ "working": true }));
        tokio::time::sleep(Duration::from_millis(work.work_ms)).await;
        std::process::id()
    });
    match done.await {
        Ok(done) => report(&json!({ "fresh": done.fresh, "stored": done.stored, "value": done.value })),
        Err(error) => report(&json!({ "error": error.to_string() })),
    }
}

/// Waits for a line of input. This blocks the only thread, so nothing else runs meanwhile.
fn wait_for(line: &str) {
    let found = std::io::stdin().lock().lines().map_while(Result::ok).find(|input| input == line);
    if found.is_none() {
        std::process::exit(0);
    }
}

fn report(line: &Value) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

//! A process that uses locks. Its argument is a `Job` in JSON; it reports by lines of JSON and in a history. Tests kill it.

use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use leasehold::pool::Permit;
use leasehold::{Error, Guard, LockManager, Options};
use leasehold_testkit::history::{Event, EventKind, HistoryWriter};
use leasehold_testkit::job::Job;
use serde_json::{Value, json};
use tokio::sync::{Mutex, broadcast};

fn main() {
    let job = std::env::args().nth(1).expect("a job as the first argument");
    let job: Job = serde_json::from_str(&job).expect("a job in JSON");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(work(job));
}

async fn work(job: Job) {
    let job = Arc::new(job);
    let history = Arc::new(HistoryWriter::open(&job.history).expect("a history"));
    let mut managers = Vec::new();
    for _ in 0..job.managers {
        let mut options = Options::default();
        options.journal = None;
        managers.push(LockManager::connect_with(&job.url, options).await.expect("a manager"));
    }
    let (input, _) = broadcast::channel(16);
    let lines = input.clone();
    let control = Arc::new(Mutex::new(input.subscribe()));
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = lines.send(line);
        }
    });
    report(&json!({ "ready": true }));
    if job.on_go {
        wait_for("go", &mut *control.lock().await).await;
    }
    let mut tasks = Vec::new();
    for (m, manager) in managers.iter().enumerate() {
        for t in 0..job.tasks {
            let task = u64::try_from(m * job.tasks + t).expect("few");
            let (manager, job, history) = (manager.clone(), job.clone(), history.clone());
            let lines = input.subscribe();
            if job.members > 0 {
                tasks.push(tokio::spawn(cycle_in_pool(manager, job, history, task, lines)));
            } else {
                tasks.push(tokio::spawn(cycle(manager, job, history, task, lines)));
            }
        }
    }
    for task in tasks {
        task.await.expect("no panic in a task");
    }
    if job.linger {
        report(&json!({ "served": true }));
        wait_for("end", &mut *control.lock().await).await;
    }
    for manager in &managers {
        manager.shutdown().await;
    }
    report(&json!({ "done": true }));
}

async fn cycle(
    manager: LockManager,
    job: Arc<Job>,
    history: Arc<HistoryWriter>,
    task: u64,
    mut lines: broadcast::Receiver<String>,
) {
    let event = |kind| Event::now(task, &job.name, kind);
    for _ in 0..job.cycles {
        history.record(&event(EventKind::Asked));
        let request = manager.lock(job.name.as_str()).owner(format!("worker-{task}"));
        let request = request.ttl(Duration::from_millis(job.ttl_ms)).wait_up_to(Duration::from_millis(job.wait_ms));
        let guard = match request.await {
            Ok(guard) => guard,
            Err(error) => {
                history.record(&event(EventKind::GaveUp));
                report(&json!({ "task": task, "error": error.to_string() }));
                continue;
            }
        };
        let fence = guard.fence().get();
        history.record(&event(EventKind::Granted).fence(fence).valid_until_ns(until(&guard)));
        let end = if job.hold {
            report(&json!({ "task": task, "granted": fence, "holder": guard.holder_id().as_str() }));
            stay(&guard, &history, &job, task, &mut lines).await
        } else {
            if job.inside_us > 0 {
                tokio::time::sleep(Duration::from_micros(job.inside_us)).await;
            }
            EventKind::ReleaseCalled
        };
        history.record(&event(end).fence(fence));
        let released = guard.release().await;
        history.record(&event(EventKind::Released).fence(fence));
        if job.hold {
            report(&json!({ "task": task, "released": released.ok() }));
        }
    }
}

/// Runs the requests of a task on a pool. The names of the members are known only when they are granted.
async fn cycle_in_pool(
    manager: LockManager,
    job: Arc<Job>,
    history: Arc<HistoryWriter>,
    task: u64,
    mut lines: broadcast::Receiver<String>,
) {
    let pool = manager.pool(job.name.as_str(), 0..job.members).expect("a pool");
    for _ in 0..job.cycles {
        let asked = Event::now(task, &job.name, EventKind::Asked);
        let request = pool.any(job.count).owner(format!("worker-{task}"));
        let request = request.ttl(Duration::from_millis(job.ttl_ms)).wait_up_to(Duration::from_millis(job.wait_ms));
        let permits = match request.await {
            Ok(permits) => permits,
            Err(error) => {
                report(&json!({ "task": task, "error": error.to_string() }));
                continue;
            }
        };
        let record = |kind, permit: &Permit| {
            let event = Event::now(task, permit.name().as_str(), kind);
            history.record(&event.fence(permit.fence().get()).valid_until_ns(until(permit)));
        };
        for permit in permits.iter() {
            history.record(&Event { name: permit.name().to_string(), ..asked.clone() });
            record(EventKind::Granted, permit);
        }
        if job.hold {
            report(&json!({ "task": task, "granted": permits.indices() }));
            while next(&mut lines).await != "release" {}
        } else {
            tokio::time::sleep(Duration::from_micros(job.inside_us)).await;
        }
        permits.iter().for_each(|permit| record(EventKind::ReleaseCalled, permit));
        let released = permits.release().await;
        report(&json!({ "task": task, "released": released.ok() }));
    }
}

/// Holds the lock until the line `release`, or until the lease is lost.
async fn stay(
    guard: &Guard,
    history: &HistoryWriter,
    job: &Job,
    task: u64,
    lines: &mut broadcast::Receiver<String>,
) -> EventKind {
    tokio::select! {
        () = obey(guard, job, task, lines) => EventKind::ReleaseCalled,
        why = guard.lost(), if !job.stubborn => {
            report(&json!({ "task": task, "lost": why.to_string() }));
            EventKind::Lost
        }
        () = record_renewals(guard, history, job, task) => EventKind::Lost,
    }
}

/// Obeys lines of input until `release`.
async fn obey(guard: &Guard, job: &Job, task: u64, lines: &mut broadcast::Receiver<String>) {
    loop {
        match next(lines).await.as_str() {
            "release" => return,
            "renew" => {
                let answer = guard.extend(Duration::from_millis(job.ttl_ms)).await;
                let lost = matches!(answer, Err(Error::Lost { .. }));
                report(&json!({ "task": task, "renewed": answer.is_ok(), "lost": lost }));
            }
            "write" => {
                let fence = guard.fence().get();
                report(&json!({ "task": task, "wrote": fence, "valid": guard.is_valid() }));
            }
            "abort" => std::process::abort(),
            _ => {}
        }
    }
}

/// Records every renewal of the lease.
async fn record_renewals(guard: &Guard, history: &HistoryWriter, job: &Job, task: u64) {
    let mut known = guard.valid_until();
    loop {
        tokio::time::sleep(Duration::from_millis(10)).await;
        if guard.valid_until() != known {
            known = guard.valid_until();
            let fence = guard.fence().get();
            history.record(&Event::now(task, &job.name, EventKind::Renewed).fence(fence).valid_until_ns(until(guard)));
        }
    }
}

fn until(guard: &Guard) -> u64 {
    u64::try_from(guard.valid_until().since_boot().as_nanos()).expect("some centuries")
}

async fn wait_for(line: &str, lines: &mut broadcast::Receiver<String>) {
    while next(lines).await != line {}
}

async fn next(lines: &mut broadcast::Receiver<String>) -> String {
    loop {
        match lines.recv().await {
            Ok(line) => return line,
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => std::process::exit(0),
        }
    }
}

fn report(line: &Value) {
    println!("{line}");
}

//! A process that uses locks: told what to do by one JSON argument (`Job`), telling what it does by
//! JSON lines, with a history of its own. Made to be killed.

use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use leasehold::{Guard, LockManager, Options};
use leasehold_testkit::history::{Event, HistoryWriter, Kind};
use leasehold_testkit::job::Job;
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
    let (tell, _) = broadcast::channel(16);
    let lines = tell.clone();
    let heard = Arc::new(Mutex::new(tell.subscribe()));
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = lines.send(line);
        }
    });
    say(r#"{"ready":true}"#);
    if job.on_go {
        wait_for("go", &mut *heard.lock().await).await;
    }
    let mut tasks = Vec::new();
    for (m, manager) in managers.iter().enumerate() {
        for t in 0..job.tasks {
            let task = u64::try_from(m * job.tasks + t).expect("few");
            let (manager, job, history) = (manager.clone(), job.clone(), history.clone());
            let releases = tell.subscribe();
            tasks.push(tokio::spawn(cycle(manager, job, history, task, releases)));
        }
    }
    for task in tasks {
        task.await.expect("no panic in a task");
    }
    for manager in &managers {
        manager.shutdown().await;
    }
    say(r#"{"done":true}"#);
}

async fn cycle(
    manager: LockManager,
    job: Arc<Job>,
    history: Arc<HistoryWriter>,
    task: u64,
    mut releases: broadcast::Receiver<String>,
) {
    let event = |kind| Event::now(task, &job.name, kind);
    for _ in 0..job.cycles {
        history.record(&event(Kind::Asked));
        let request = manager.lock(job.name.as_str()).owner(format!("worker-{task}"));
        let request = request.ttl(Duration::from_millis(job.ttl_ms)).wait_up_to(Duration::from_millis(job.wait_ms));
        let guard = match request.await {
            Ok(guard) => guard,
            Err(error) => {
                history.record(&event(Kind::GaveUp));
                say(&serde_json::json!({ "task": task, "error": error.to_string() }).to_string());
                continue;
            }
        };
        let fence = guard.fence().expect("fenced").get();
        history.record(&event(Kind::Granted).fence(fence).valid_until_ns(until(&guard)));
        if job.hold {
            say(&serde_json::json!({ "task": task, "granted": fence, "holder": guard.holder_id().as_str() })
                .to_string());
            let told = tokio::select! {
                () = wait_for("release", &mut releases) => true,
                why = guard.lost() => {
                    say(&serde_json::json!({ "task": task, "lost": why.to_string() }).to_string());
                    false
                }
                () = record_renewals(&guard, &history, &job, task) => false,
            };
            history.record(&event(if told { Kind::ReleaseCalled } else { Kind::Lost }).fence(fence));
        } else {
            if job.inside_us > 0 {
                tokio::time::sleep(Duration::from_micros(job.inside_us)).await;
            }
            history.record(&event(Kind::ReleaseCalled).fence(fence));
        }
        let released = guard.release().await;
        history.record(&event(Kind::Released).fence(fence));
        if job.hold {
            say(&serde_json::json!({ "task": task, "released": released.ok() }).to_string());
        }
    }
}

/// A renewed lease lasts longer than the grant said.
async fn record_renewals(guard: &Guard, history: &HistoryWriter, job: &Job, task: u64) {
    let mut known = guard.valid_until();
    loop {
        tokio::time::sleep(Duration::from_millis(10)).await;
        if guard.valid_until() != known {
            known = guard.valid_until();
            let fence = guard.fence().expect("fenced").get();
            history.record(&Event::now(task, &job.name, Kind::Renewed).fence(fence).valid_until_ns(until(guard)));
        }
    }
}

fn until(guard: &Guard) -> u64 {
    u64::try_from(guard.valid_until().since_boot().as_nanos()).expect("some centuries")
}

async fn wait_for(line: &str, lines: &mut broadcast::Receiver<String>) {
    loop {
        match lines.recv().await {
            Ok(heard) if heard == line => return,
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => std::process::exit(0),
        }
    }
}

fn say(line: &str) {
    println!("{line}");
}

//! Many processes on one lock: never two holders, fences rise, requests are served in order, nothing is left behind.

use std::path::Path;
use std::time::Duration;

use leasehold_testkit::job::Job;
use leasehold_testkit::{Arena, History, Kind, WorkerProcess, full_or, report};

const WORKER: &str = env!("CARGO_BIN_EXE_worker");
const LONG: Duration = Duration::from_secs(300);

/// 10 tasks in 4 processes on one name.
async fn ten_tasks_in_four_processes(kind: Kind) {
    let arena = Arena::new(kind).await;
    let url = arena.url().expect("a store that processes can share");
    let dir = tempfile::tempdir().expect("a directory");
    let cycles = full_or(100, 1_000);
    let mut workers = Vec::new();
    for tasks in [3, 3, 2, 2] {
        let mut job = Job::new(&url, "busy", dir.path().to_owned());
        (job.tasks, job.cycles, job.on_go) = (tasks, cycles, true);
        workers.push(WorkerProcess::spawn(WORKER, &job));
    }
    for worker in &mut workers {
        worker.wait_for_line(|line| line["ready"] == true, LONG).await.expect("ready");
    }
    let began = std::time::Instant::now();
    workers.iter_mut().for_each(|worker| worker.send_line("go"));
    for worker in &mut workers {
        worker.wait_for_line(|line| line["done"] == true, LONG).await.expect("done in time");
    }
    let history = check(dir.path());
    let grants = history.grants();
    assert_eq!(grants, 10 * cycles, "everybody was served");
    let left = arena.manager().await.list("", None, 10).await.expect("answered").locks;
    assert!(left.is_empty(), "{left:?}");
    let rate = grants as f64 / began.elapsed().as_secs_f64();
    report(
        "processes",
        format!("{kind:?}: {grants} grants by 10 tasks in 4 processes, 0 overlaps, 0 fence inversions, {rate:.0}/s"),
    );
}

fn check(dir: &Path) -> History {
    let history = History::read(dir).expect("a history");
    assert!(history.overlaps().is_empty(), "two inside: {:?}", history.overlaps());
    assert!(history.fence_inversions().is_empty(), "{:?}", history.fence_inversions());
    history
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_tasks_in_four_processes_on_redis() {
    ten_tasks_in_four_processes(Kind::Redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_tasks_in_four_processes_on_sqlite() {
    ten_tasks_in_four_processes(Kind::Sqlite).await;
}

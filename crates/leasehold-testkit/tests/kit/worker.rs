use std::path::Path;
use std::time::Duration;

use leasehold_testkit::WorkerProcess;
use serde_json::json;

const SHORT: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(5);

async fn worker() -> WorkerProcess {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kit/worker.sh");
    let mut worker = WorkerProcess::spawn(script, &json!({ "name": "a", "ttl_ms": 2000 }));
    let spec = worker.next_line(LONG).await;
    assert_eq!(spec, Some(json!({ "name": "a", "ttl_ms": 2000 })));
    worker
}

#[tokio::test]
async fn a_worker_exchanges_lines_of_json_and_ends() {
    let mut worker = worker().await;
    worker.send_line("plain words");
    worker.send_line(r#"{"n": 1}"#);
    worker.send_line(r#"{"n": 2}"#);
    assert_eq!(worker.next_line(LONG).await, Some(json!("plain words")));
    assert_eq!(worker.wait_for_line(|line| line["n"] == 2, LONG).await, Some(json!({ "n": 2 })));
    assert!(worker.wait(SHORT).await.is_none(), "it still runs");
    worker.close_input();
    assert_eq!(worker.wait(LONG).await.and_then(|status| status.code()), Some(3));
    assert_eq!(worker.next_line(LONG).await, None);
    worker.pause();
    worker.kill9();
}

#[tokio::test]
async fn a_paused_worker_prints_nothing() {
    let mut worker = worker().await;
    worker.pause();
    worker.send_line("1");
    assert_eq!(worker.next_line(SHORT).await, None);
    worker.resume();
    assert_eq!(worker.next_line(LONG).await, Some(json!(1)));
}

#[tokio::test]
async fn a_worker_ends_after_a_kill_or_a_drop() {
    let mut killed = worker().await;
    killed.pause();
    killed.kill9();
    assert!(!Path::new(&format!("/proc/{}", killed.pid())).exists());
    killed.send_line("nobody hears this");

    let dropped = worker().await;
    let process = format!("/proc/{}", dropped.pid());
    drop(dropped);
    assert!(!Path::new(&process).exists());
}

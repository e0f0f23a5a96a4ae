//! A program without an async runtime that uses locks. Its arguments are `URL NAME WHAT`.

use std::time::{Duration, Instant};

use leasehold::blocking::LockManager;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, url, name, what] = arguments.as_slice() else { panic!("URL NAME WHAT") };
    let locks = LockManager::connect(url).expect("a manager");
    let guard = locks.lock(name.as_str()).wait_up_to(Duration::from_secs(20)).acquire().expect("the lock");
    println!("{{\"granted\": {}}}", guard.fence().get());
    match what.as_str() {
        // Without a release or a shutdown: returning from `main` is enough.
        "return" => {}
        "panic" => panic!("on purpose"),
        "wait" => {
            let _ = guard.lost_within(Duration::from_secs(60));
        }
        "threads" => {
            wait_for_threads(1);
            let clone = locks.clone();
            drop(guard);
            drop(locks);
            // The clone keeps the thread.
            assert!(!clone.is_locked(name.as_str()).expect("answered"));
            wait_for_threads(1);
            drop(clone);
            wait_for_threads(0);
            println!("{{\"threads\": 0}}");
        }
        other => panic!("unknown: {other}"),
    }
}

/// Waits until `wanted` threads of this process are leasehold's. A new thread has its parent's name for a moment, and a joined
/// thread is listed for a moment longer.
fn wait_for_threads(wanted: usize) {
    let began = Instant::now();
    loop {
        let tasks = std::fs::read_dir("/proc/self/task").expect("threads").filter_map(Result::ok);
        let names: Vec<String> =
            tasks.map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()).collect();
        if names.iter().filter(|name| name.trim() == "leasehold").count() == wanted {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(10), "{wanted} wanted, but {names:?}");
    }
}

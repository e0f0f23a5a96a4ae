//! A program without an async runtime that uses locks: told by arguments what to do, `URL NAME WHAT`.

use std::time::{Duration, Instant};

use leasehold::blocking::LockManager;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, url, name, what] = arguments.as_slice() else { panic!("URL NAME WHAT") };
    let locks = LockManager::connect(url).expect("a manager");
    let guard = locks.lock(name.as_str()).wait_up_to(Duration::from_secs(20)).acquire().expect("the lock");
    println!("{{\"granted\": {}}}", guard.fence().get());
    match what.as_str() {
        // Neither a release nor a shutdown: leaving the function is enough.
        "return" => {}
        "panic" => panic!("on purpose"),
        "wait" => {
            let _ = guard.lost_within(Duration::from_secs(60));
        }
        "threads" => {
            until_threads(1);
            let clone = locks.clone();
            drop(guard);
            drop(locks);
            // A clone still needs it.
            assert!(!clone.is_locked(name.as_str()).expect("answered"));
            until_threads(1);
            drop(clone);
            until_threads(0);
            println!("{{\"threads\": 0}}");
        }
        other => panic!("unknown: {other}"),
    }
}

/// Until so many threads of this process are leasehold's runtime. A thread that begins has its parent's
/// name for a moment, and one that has been joined is listed for a moment longer.
fn until_threads(wanted: usize) {
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

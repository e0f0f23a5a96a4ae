use std::sync::Arc;

use leasehold_testkit::history::{Event, EventKind};
use leasehold_testkit::{History, HistoryWriter};

#[test]
fn lines_of_many_writers_come_back_in_order_of_time() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let shared = Arc::new(HistoryWriter::open(dir.path()).expect("a history file"));
    let threads: Vec<_> = (0..8)
        .map(|task| {
            let shared = Arc::clone(&shared);
            let own = HistoryWriter::open(dir.path()).expect("a history file");
            std::thread::spawn(move || {
                for fence in 0..100 {
                    shared.record(&Event::now(task, "a", EventKind::Asked));
                    own.record(&Event::now(task, "a", EventKind::Granted).fence(fence).valid_until_ns(u64::MAX));
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic");
    }
    std::fs::write(dir.path().join("notes.txt"), "not a history").expect("a file beside them");

    let history = History::read(dir.path()).expect("a readable history");
    assert_eq!(history.events().len(), 1600);
    assert_eq!(history.grants(), 800);
    assert!(history.events().is_sorted_by_key(|event| event.at_ns));
    assert!(!history.overlaps().is_empty() && !history.fence_inversions().is_empty());
}

#[test]
fn a_line_has_the_agreed_fields() {
    let event = Event::now(7, "a", EventKind::ReleaseCalled).fence(3).valid_until_ns(9);
    let line = serde_json::to_value(&event).expect("plain data");
    assert_eq!(line["kind"], "release_called");
    assert_eq!(line["pid"], std::process::id());
    assert_eq!((&line["task"], &line["fence"], &line["valid_until_ns"]), (&7.into(), &3.into(), &9.into()));
    assert!(line["at_ns"].as_u64().is_some_and(|at_ns| at_ns > 0));
}

#[test]
fn a_damaged_history_is_an_error() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(dir.path().join("1.jsonl"), "{\"at_ns\": 1").expect("a damaged file");
    let error = History::read(dir.path()).expect_err("not a whole line");
    assert!(error.to_string().contains("1.jsonl, line 1"), "{error}");
}

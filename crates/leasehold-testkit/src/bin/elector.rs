//! A candidate in an election. Its argument is JSON; it reports its terms by lines of JSON and in a history. Tests kill it, or
//! send the line `resign`.

use std::io::BufRead;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use leasehold::elect::Term;
use leasehold::{LockManager, Options};
use leasehold_testkit::history::{Event, EventKind, HistoryWriter};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Notify;

#[derive(Deserialize)]
struct Candidate {
    url: String,
    name: String,
    ttl_ms: u64,
    history: PathBuf,
}

fn main() {
    let candidate = std::env::args().nth(1).expect("a candidate as the first argument");
    let candidate: Candidate = serde_json::from_str(&candidate).expect("a candidate in JSON");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(stand(candidate));
}

async fn stand(candidate: Candidate) {
    let history = HistoryWriter::open(&candidate.history).expect("a history");
    let mut options = Options::default();
    options.journal = None;
    let locks = LockManager::connect_with(&candidate.url, options).await.expect("a manager");
    let resigned = Arc::new(Notify::new());
    let resign = resigned.clone();
    std::thread::spawn(move || {
        for _ in std::io::stdin().lock().lines().map_while(Result::ok) {
            resign.notify_one();
        }
    });
    println!("{}", json!({ "standing": true }));
    let election = locks.elect(candidate.name.as_str()).ttl(Duration::from_millis(candidate.ttl_ms));
    let led = election.run(|term| {
        let (term, resigned) = (RecordedTerm::begin(term, &history), &resigned);
        async move {
            tokio::select! {
                () = term.record_renewals() => {}
                () = resigned.notified() => {}
            }
            Ok::<_, leasehold::Error>(())
        }
    });
    led.await.expect("no permanent error");
    locks.shutdown().await;
    println!("{}", json!({ "resigned": true }));
}

/// Records a term, even if it is cancelled.
struct RecordedTerm<'a> {
    term: Term,
    history: &'a HistoryWriter,
}

impl<'a> RecordedTerm<'a> {
    fn begin(term: Term, history: &'a HistoryWriter) -> Self {
        let recorded = Self { term, history };
        recorded.record(EventKind::Granted);
        println!("{}", json!({ "leading": recorded.fence() }));
        recorded
    }

    fn fence(&self) -> u64 {
        self.term.fence().get()
    }

    fn record(&self, kind: EventKind) {
        let until = u64::try_from(self.term.valid_until().since_boot().as_nanos()).expect("some centuries");
        let event = Event::now(0, self.term.name().as_str(), kind).fence(self.fence());
        self.history.record(&event.valid_until_ns(until));
    }

    async fn record_renewals(&self) {
        let mut known = self.term.valid_until();
        loop {
            tokio::time::sleep(Duration::from_millis(10)).await;
            if self.term.valid_until() != known {
                known = self.term.valid_until();
                self.record(EventKind::Renewed);
            }
        }
    }
}

impl Drop for RecordedTerm<'_> {
    fn drop(&mut self) {
        let lost = self.term.loss();
        self.record(if lost.is_some() { EventKind::Lost } else { EventKind::ReleaseCalled });
        println!("{}", json!({ "ended": self.fence(), "lost": lost.map(|why| why.to_string()) }));
    }
}

//! A lock on SQLite against the least that could be written: two plain upserts of one row, each committed by itself,
//! through a driver thread of the same kind.

use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use leasehold::{LockManager, Options};
use tokio::sync::oneshot;

use crate::steady::Together;
use crate::{Size, median, row};

const UPSERT: &str =
    "INSERT INTO plain VALUES (1, ?1, ?2) ON CONFLICT (k) DO UPDATE SET v = excluded.v, n = excluded.n";
const VALUE: &str = "a token of thirty-two characters and as much again for its owner";
/// The write-ahead log is restarted when it has more frames than this, as the store does.
const FRAMES: i64 = 4_000;

pub(crate) async fn run(size: Size) {
    // On two processors, the ratio depends mostly on where the kernel puts the threads.
    let _steady = Together::keep();
    let dir = tempfile::tempdir().expect("a directory");
    let mut options = Options::default();
    options.journal = None;
    let url = format!("sqlite:{}", dir.path().join("locks.db").display());
    let manager = LockManager::connect_with(&url, options).await.expect("a manager");
    let plain = plain(&dir.path().join("plain.db"));
    let (mut ratios, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..size.rounds {
        let locks = pairs_per_second(size.seconds, async || {
            assert!(manager.lock("bench").await.expect("free").release().await.expect("answered"));
        })
        .await;
        let commits = pairs_per_second(size.seconds, async || {
            for _ in 0..2 {
                let (reply, done) = oneshot::channel();
                plain.send(reply).expect("the thread runs");
                done.await.expect("answered");
            }
        })
        .await;
        ratios.push(locks / commits);
        ours.push(locks);
        theirs.push(commits);
    }
    println!("SQLite: {:.0} locks/s, {:.0} pairs of plain commits/s", median(ours), median(theirs));
    let ratio = median(ratios);
    row("SQLite lock + unlock / two plain commits", ratio, "≥ 0.45", ratio >= 0.45);
}

async fn pairs_per_second(seconds: f64, pair: impl AsyncFn()) -> f64 {
    let (began, mut done) = (Instant::now(), 0_u32);
    while began.elapsed() < Duration::from_secs_f64(seconds) {
        pair().await;
        done += 1;
    }
    f64::from(done) / began.elapsed().as_secs_f64()
}

fn plain(path: &Path) -> Sender<oneshot::Sender<()>> {
    let conn = rusqlite::Connection::open(path).expect("a database");
    conn.execute_batch("PRAGMA page_size = 1024").expect("set");
    conn.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(())).expect("set");
    conn.execute_batch("PRAGMA synchronous = NORMAL; CREATE TABLE plain (k INTEGER PRIMARY KEY, v TEXT, n INTEGER)")
        .expect("made");
    conn.query_row("PRAGMA wal_autocheckpoint = 0", [], |_| Ok(())).expect("set");
    let (send, receive) = channel::<oneshot::Sender<()>>();
    std::thread::spawn(move || {
        let mut n = 0_i64;
        while let Ok(reply) = receive.recv() {
            n += 1;
            conn.prepare_cached(UPSERT).and_then(|mut s| s.execute((VALUE, n))).expect("written");
            let _ = reply.send(());
            if n % 64 == 0 {
                let frames = conn.query_row("PRAGMA wal_checkpoint(NOOP)", [], |row| row.get::<_, i64>(1));
                if frames.expect("answered") > FRAMES {
                    conn.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(())).expect("checkpointed");
                }
            }
        }
    });
    send
}

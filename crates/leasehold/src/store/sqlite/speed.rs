//! What a lock costs beside the least that could be written: prints a ratio.

use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::{SqliteStore, schema};
use crate::store::*;

const RUN: Duration = Duration::from_millis(1_500);

fn claim(name: String) -> Claim {
    Claim {
        name: LockName::new(name).expect("valid"),
        token: Token::random(),
        ttl: Ttl::default(),
        owner: Owner::default(),
        fenced: true,
        listens: true,
        since_ms: 1,
    }
}

/// Pairs a second of one task after the other, or of many at once.
async fn pairs(tasks: usize, pair: impl AsyncFn(usize)) -> f64 {
    let began = Instant::now();
    let loops = (0..tasks).map(async |task| {
        let mut done = 0_u32;
        while began.elapsed() < RUN {
            pair(task).await;
            done += 1;
        }
        done
    });
    let done: u32 = futures_util::future::join_all(loops).await.into_iter().sum();
    f64::from(done) / began.elapsed().as_secs_f64()
}

type Upsert = (i64, oneshot::Sender<()>);

/// One row changed in one commit, behind a thread of the same kind.
fn plain(path: &std::path::Path) -> Sender<Upsert> {
    let (conn, ..) = schema::open(path).expect("opens");
    conn.execute_batch("CREATE TABLE plain (k INTEGER PRIMARY KEY, v TEXT, n INTEGER)").expect("creates");
    let (send, receive) = channel::<Upsert>();
    std::thread::spawn(move || {
        let mut n = 0_i64;
        while let Ok((key, reply)) = receive.recv() {
            n += 1;
            let text =
                "INSERT INTO plain VALUES (?1, ?2, ?3) ON CONFLICT (k) DO UPDATE SET v = excluded.v, n = excluded.n";
            let value = "a token of thirty-two characters and as much again for its owner";
            conn.prepare_cached(text).and_then(|mut s| s.execute((key, value, n))).expect("writes");
            if n % 4_000 == 0 {
                conn.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(())).expect("checkpoints");
            }
            let _ = reply.send(());
        }
    });
    send
}

#[tokio::test]
async fn a_lock_costs_little_more_than_two_commits() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = SqliteStore::open(&dir.path().join("locks.db")).expect("opens");
    let upserts = plain(&dir.path().join("plain.db"));
    for tasks in [1, 64] {
        let locks = pairs(tasks, async |task| {
            let claim = claim(format!("speed:{task}"));
            assert!(matches!(store.try_acquire(&claim).await, Ok(Try::Granted(_))));
            assert_eq!(store.release(&claim.name, &claim.token).await, Ok(Release::Released));
        })
        .await;
        let commits = pairs(tasks, async |task| {
            for _ in 0..2 {
                let (reply, done) = oneshot::channel();
                upserts.send((i64::try_from(task).expect("small"), reply)).expect("runs");
                done.await.expect("answers");
            }
        })
        .await;
        println!(
            "{tasks} tasks: {locks:.0} try+release/s, {commits:.0} pairs of commits/s, ratio {:.2}",
            locks / commits
        );
        assert!(locks / commits > 0.2, "far below the measured 0.45 and more");
    }
}

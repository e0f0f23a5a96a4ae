//! What a lock costs beside the least that could be written: prints a ratio.

use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::{SqliteStore, schema};
use crate::store::*;

/// Rounds of both kinds alternate, so that a busy machine slows both.
const ROUND: Duration = Duration::from_millis(150);
const ROUNDS: usize = 15;

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
        while began.elapsed() < ROUND {
            pair(task).await;
            done += 1;
        }
        done
    });
    let done: u32 = futures_util::future::join_all(loops).await.into_iter().sum();
    f64::from(done) / began.elapsed().as_secs_f64()
}

type Upsert = (i64, oneshot::Sender<()>);

/// One row changed per command, behind a thread of the same kind: what waits in the channel shares
/// a commit if `together`, and the log is started anew after the answers, as the store does it.
fn plain(path: &std::path::Path, together: bool) -> Sender<Upsert> {
    const UPSERT: &str =
        "INSERT INTO plain VALUES (?1, ?2, ?3) ON CONFLICT (k) DO UPDATE SET v = excluded.v, n = excluded.n";
    let (conn, ..) = schema::open(path).expect("opens");
    conn.execute_batch("CREATE TABLE plain (k INTEGER PRIMARY KEY, v TEXT, n INTEGER)").expect("creates");
    let (send, receive) = channel::<Upsert>();
    std::thread::spawn(move || {
        let run = |text: &str| conn.prepare_cached(text).and_then(|mut s| s.execute([])).expect("runs");
        let (mut n, mut commits) = (0_i64, 0_u32);
        while let Ok(first) = receive.recv() {
            let mut batch = vec![first];
            while together && batch.len() < 64 {
                let Ok(next) = receive.try_recv() else { break };
                batch.push(next);
            }
            let many = batch.len() > 1;
            if many {
                run("BEGIN IMMEDIATE");
            }
            for (key, _) in &batch {
                n += 1;
                let value = "a token of thirty-two characters and as much again for its owner";
                conn.prepare_cached(UPSERT).and_then(|mut s| s.execute((key, value, n))).expect("writes");
            }
            if many {
                run("COMMIT");
            }
            for (_, reply) in batch {
                let _ = reply.send(());
            }
            commits += 1;
            if commits % 64 == 0 {
                let frames = conn.query_row("PRAGMA wal_checkpoint(NOOP)", [], |row| row.get::<_, i64>(1));
                if frames.expect("answers") > 4_000 {
                    conn.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(())).expect("checkpoints");
                }
            }
        }
    });
    send
}

#[tokio::test]
async fn a_lock_costs_little_more_than_two_commits() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = SqliteStore::open(&dir.path().join("locks.db")).expect("opens");
    let single = plain(&dir.path().join("single.db"), false);
    let batched = plain(&dir.path().join("batched.db"), true);
    for (tasks, kind, upserts) in [(1, "single", &single), (64, "single", &single), (64, "shared", &batched)] {
        let (mut locks, mut commits, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let ours = pairs(tasks, async |task| {
                let claim = claim(format!("speed:{task}"));
                assert!(matches!(store.try_acquire(&claim).await, Ok(Try::Granted(_))));
                assert_eq!(store.release(&claim.name, &claim.token).await, Ok(Release::Released));
            })
            .await;
            let plain = pairs(tasks, async |task| {
                for _ in 0..2 {
                    let (reply, done) = oneshot::channel();
                    upserts.send((i64::try_from(task).expect("small"), reply)).expect("runs");
                    done.await.expect("answers");
                }
            })
            .await;
            locks.push(ours);
            commits.push(plain);
            ratios.push(ours / plain);
        }
        let spread = (quantile(&mut ratios, 4), quantile(&mut ratios, 2), quantile(&mut ratios, 1));
        println!(
            "{tasks} tasks, {kind} commits: {:.0} try+release/s, {:.0} plain pairs/s, ratio {:.2} (quarter {:.2}, highest {:.2})",
            quantile(&mut locks, 2),
            quantile(&mut commits, 2),
            spread.1,
            spread.0,
            spread.2
        );
        assert!(spread.1 > 0.2, "far below what was measured");
    }
}

/// The value one `part`th of the way up; the highest for 1.
fn quantile(values: &mut [f64], part: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() / part).min(values.len() - 1)]
}

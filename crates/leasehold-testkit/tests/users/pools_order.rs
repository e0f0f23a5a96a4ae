//! How often a request for several members is overtaken by a later request for a single member.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold_testkit::{Arena, Kind, full_or};

/// When a request was sent, and when it was served.
type Served = (Instant, Instant);

/// Returns the share of requests for several members that were overtaken, and the largest difference in age.
fn overtaken(several: &[Served], singles: &[Served]) -> (f64, Duration) {
    let mut count = 0;
    let mut age = Duration::ZERO;
    for (asked, served) in several {
        let by =
            singles.iter().filter(|single| single.0 > *asked && single.1 < *served).map(|single| single.0 - *asked);
        if let Some(by) = by.max() {
            count += 1;
            age = age.max(by);
        }
    }
    (f64::from(count) * 100.0 / several.len() as f64, age)
}

/// Prints the number that `docs/guarantees.md` contains.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_for_several_are_seldom_overtaken() {
    let arena = Arena::new(Kind::Redis).await;
    let ends = Instant::now() + full_or(Duration::from_secs(2), Duration::from_secs(20));
    let (several, singles) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let mut tasks = Vec::new();
    for task in 0..8 {
        let pool = arena.manager().await.pool("gpu_lock", 0..4).expect("a pool");
        let (several, singles) = (several.clone(), singles.clone());
        tasks.push(tokio::spawn(async move {
            while Instant::now() < ends {
                let asked = Instant::now();
                if task < 2 {
                    let permits = pool.any(3).await.expect("its turn");
                    several.lock().expect("no panic").push((asked, Instant::now()));
                    tokio::time::sleep(Duration::from_millis(3)).await;
                    permits.release().await.expect("answered");
                } else {
                    let permit = pool.acquire().await.expect("its turn");
                    singles.lock().expect("no panic").push((asked, Instant::now()));
                    tokio::time::sleep(Duration::from_millis(3)).await;
                    permit.release().await.expect("answered");
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }));
    }
    for task in tasks {
        task.await.expect("no panic");
    }
    let (several, singles) = (several.lock().expect("no panic"), singles.lock().expect("no panic"));
    assert!(!several.is_empty() && !singles.is_empty());
    let (percent, age) = overtaken(&several, &singles);
    println!(
        "{percent:.0} % of {} requests for three of four were overtaken, by requests at most {age:.1?} younger",
        several.len()
    );
}

//! GPUs: one by its number, any of them, and clean-up before the release.

use std::sync::Mutex;
use std::time::Duration;

use leasehold::config::{Config, GpuScope};
use leasehold::gpu::{CleanUp, Devices, GpuPool, Leaving, gpu_lock};
use leasehold::inspect::EvictMode;
use leasehold::{Error, LockManager};
use leasehold_testkit::{Arena, on_every_store};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::timeout;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(
    one_at_a_time_as_the_configuration_says,
    a_call_can_override_the_manager,
    the_clean_up_always_runs_before_the_release,
    a_failing_clean_up_does_not_prevent_the_release,
    a_command_cleans_up,
    any_of_a_pool_and_those_by_number,
    a_pool_cleans_up_when_it_is_dropped,
    several_are_collected_without_a_deadlock,
);

async fn manager(arena: &Arena) -> LockManager {
    let mut options = Config::default().gpu_options();
    options.journal = arena.options().journal;
    arena.manager_with(options).await
}

/// Waits until no lock is held, so that background work is done.
async fn until_free(locks: &LockManager, name: &str) {
    let free = async {
        while locks.is_locked(name).await.expect("answered") {
            tokio::time::sleep(ms(2)).await;
        }
    };
    timeout(LONG, free).await.unwrap_or_else(|_| panic!("{name} is never free"));
}

#[gpu_lock(gpu_id = 0, locks = locks)]
async fn holder_of_gpu_0(locks: &LockManager) -> Result<leasehold::inspect::Holder, Error> {
    assert!(leasehold::current_fence().is_some(), "at hand for whatever is called");
    Ok(locks.holder("gpu_lock:0").await?.expect("held"))
}

async fn one_at_a_time_as_the_configuration_says(arena: Arena) {
    let locks = manager(&arena).await;
    let holder = holder_of_gpu_0(&locks).await.expect("free");
    assert_eq!(holder.ttl, Some(Duration::from_secs(300)), "no longer than the heartbeat's timeout");
    assert!(!locks.is_locked("gpu_lock:0").await.expect("answered"));
    // It waits by default (for up to 300 s).
    let guard = locks.lock("gpu_lock:0").await.expect("free");
    let waiting = tokio::spawn({
        let locks = locks.clone();
        async move { holder_of_gpu_0(&locks).await }
    });
    let looker = arena.manager().await;
    while looker.info("gpu_lock:0").await.expect("answered").waiters.is_empty() {
        tokio::time::sleep(ms(2)).await;
    }
    guard.release().await.expect("answered");
    timeout(LONG, waiting).await.expect("in time").expect("no panic").expect("its turn");
}

#[gpu_lock(gpu_id = gpu, locks = locks, max_wait_time = 0, lock_timeout = 60)]
async fn at_once(locks: &LockManager, gpu: u32) -> Result<Option<Duration>, Error> {
    Ok(locks.holder(format!("gpu_lock:{gpu}")).await?.expect("held").ttl)
}

async fn a_call_can_override_the_manager(arena: Arena) {
    let locks = manager(&arena).await;
    assert_eq!(at_once(&locks, 3).await.expect("free"), Some(Duration::from_secs(60)));
    let _guard = locks.lock("gpu_lock:3").await.expect("free");
    let refused = at_once(&locks, 3).await;
    assert!(matches!(&refused, Err(Error::NotAcquired { name, .. }) if name.as_str() == "gpu_lock:3"), "{refused:?}");
}

/// The ends of the work.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Returns,
    Fails,
    Panics,
    IsDropped,
    LosesItsLease,
}

#[gpu_lock(gpu_id = 1, locks = locks, cleanup = cleaning(locks.clone(), cleaned))]
async fn ends(
    locks: &LockManager,
    end: End,
    cleaned: UnboundedSender<(bool, bool)>,
    inside: UnboundedSender<()>,
) -> Result<(), Error> {
    let _ = inside.send(());
    match end {
        End::Returns => Ok(()),
        End::Fails => Err(leasehold::LockName::new("").expect_err("no name").into()),
        End::Panics => panic!("on purpose"),
        End::IsDropped | End::LosesItsLease => std::future::pending().await,
    }
}

/// A clean-up that reports whether the lock was still held, and whether it was notified of a loss.
fn cleaning(
    locks: LockManager,
    cleaned: UnboundedSender<(bool, bool)>,
) -> impl FnOnce(Leaving) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
    move |leaving| {
        Box::pin(async move {
            let held = locks.is_locked("gpu_lock:1").await.expect("answered");
            let _ = cleaned.send((held, leaving.lost));
        })
    }
}

async fn the_clean_up_always_runs_before_the_release(arena: Arena) {
    let locks = manager(&arena).await;
    for end in [End::Returns, End::Fails, End::Panics, End::IsDropped, End::LosesItsLease] {
        let (cleaned, mut was_cleaned) = unbounded_channel();
        let (inside, mut is_inside) = unbounded_channel();
        let work = tokio::spawn({
            let locks = locks.clone();
            async move { ends(&locks, end, cleaned, inside).await }
        });
        timeout(LONG, is_inside.recv()).await.expect("in time").expect("inside");
        match end {
            End::IsDropped => work.abort(),
            End::LosesItsLease => {
                let holder = locks.holder("gpu_lock:1").await.expect("answered").expect("held");
                locks.evict("gpu_lock:1", holder.id, EvictMode::Revoke, "a test").await.expect("answered");
            }
            _ => {}
        }
        let (held, lost) = timeout(LONG, was_cleaned.recv()).await.expect("in time").expect("cleaned up");
        assert!(held, "{end:?}: given back before it was cleaned up");
        assert_eq!(lost, end == End::LosesItsLease, "{end:?}");
        let ended = timeout(LONG, work).await.expect("in time");
        match end {
            End::Returns => ended.expect("no panic").expect("done"),
            End::Fails => assert!(matches!(ended.expect("no panic"), Err(Error::Invalid(_))), "its own error"),
            End::Panics => assert!(ended.expect_err("it panics").is_panic()),
            End::IsDropped => assert!(ended.expect_err("it was dropped").is_cancelled()),
            End::LosesItsLease => assert!(matches!(ended.expect("no panic"), Err(Error::Lost { .. }))),
        }
        until_free(&locks, "gpu_lock:1").await;
    }
}

#[gpu_lock(gpu_id = 2, locks = locks, cleanup = async |_| Err::<(), _>("it does not work"))]
async fn with_a_failing_clean_up(locks: &LockManager) -> Result<u32, Error> {
    Ok(1)
}

async fn panics(_: Leaving) {
    panic!("on purpose");
}

#[gpu_lock(gpu_id = 2, locks = locks, cleanup = panics)]
async fn with_a_panicking_clean_up(locks: &LockManager) -> Result<u32, Error> {
    Ok(2)
}

#[gpu_lock(gpu_id = 2, locks = locks, cleanup = async |_| std::future::pending::<()>().await, cleanup_timeout = 0)]
async fn with_an_endless_clean_up(locks: &LockManager) -> Result<u32, Error> {
    Ok(3)
}

#[gpu_lock(gpu_id = 2, locks = locks, cleanup = "exit 3")]
async fn with_a_failing_command(locks: &LockManager) -> Result<u32, Error> {
    Ok(4)
}

#[gpu_lock(gpu_id = 2, locks = locks, cleanup = "sleep 1000", cleanup_timeout = 0)]
async fn with_an_endless_command(locks: &LockManager) -> Result<u32, Error> {
    Ok(5)
}

async fn a_failing_clean_up_does_not_prevent_the_release(arena: Arena) {
    let locks = manager(&arena).await;
    let results = [
        with_a_failing_clean_up(&locks).await,
        with_a_panicking_clean_up(&locks).await,
        timeout(LONG, with_an_endless_clean_up(&locks)).await.expect("bounded"),
        with_a_failing_command(&locks).await,
        timeout(LONG, with_an_endless_command(&locks)).await.expect("bounded"),
    ];
    for (result, expected) in results.into_iter().zip(1..) {
        assert_eq!(result.expect("the work's own result"), expected);
    }
    assert!(!locks.is_locked("gpu_lock:2").await.expect("answered"));
}

fn pool(locks: &LockManager, gpus: u32) -> GpuPool {
    GpuPool::new(locks, &Config::default(), Devices::discover(Some(gpus)).expect("so many")).expect("a pool")
}

async fn a_command_cleans_up(arena: Arena) {
    let locks = manager(&arena).await;
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("cleaned");
    let script = "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $LEASEHOLD_LOST > $0";
    let command = || CleanUp::command(["sh".as_ref(), "-c".as_ref(), script.as_ref(), file.as_os_str()]);
    let gpus = pool(&locks, 3).any(2).clean_up(command()).await.expect("free");
    let holder = gpus.guards()[0].holder_id();
    assert!(gpus.release().await.expect("answered"));
    assert_eq!(std::fs::read_to_string(&file).expect("written"), "0,1 PCI_BUS_ID false\n");
    assert_ne!(locks.holder("gpu_lock:0").await.expect("answered").map(|other| other.id), Some(holder));

    let gpus = pool(&locks, 3).acquire().clean_up(command()).await.expect("free");
    locks.evict("gpu_lock:0", gpus.guards()[0].holder_id(), EvictMode::Revoke, "a test").await.expect("answered");
    timeout(LONG, gpus.lost()).await.expect("in time");
    let _ = gpus.release().await.expect("answered");
    assert_eq!(std::fs::read_to_string(&file).expect("written"), "0 PCI_BUS_ID true\n");
}

async fn any_of_a_pool_and_those_by_number(arena: Arena) {
    let locks = manager(&arena).await;
    let gpus = pool(&locks, 3);
    let first = gpus.acquire().owner("tts").no_wait().await.expect("free");
    assert_eq!((first.ids(), first.visible().as_str()), (vec![0], "0"));
    let info = locks.info("gpu_lock:0").await.expect("answered");
    assert_eq!(info.holder.expect("held").owner.task(), "tts");
    let last = gpus.only(&[2]).expect("here").no_wait().await.expect("free");
    assert_eq!(last.ids(), [2]);
    assert!(matches!(gpus.any(2).no_wait().await, Err(Error::PoolBusy { wanted: 2, .. })), "one is left");
    assert!(matches!(gpus.only(&[2]).expect("here").no_wait().await, Err(Error::NotAcquired { .. })));
    assert!(gpus.only(&[3]).is_err_and(|error| error.to_string().contains("0, 1, 2")));
    assert!(gpus.only(&[]).is_err() && gpus.only(&[1, 1]).is_err());
    let work =
        async |gpus: &leasehold::gpu::Gpus| (gpus.ids(), leasehold::current_fence(), gpus.guards()[0].try_fence());
    let (ids, found, own) = gpus.acquire().run(work).await.expect("the one that is left");
    assert_eq!(ids, [1]);
    assert!(found.is_some() && found == own, "{found:?} and {own:?}");
    first.release().await.expect("answered");
    last.release().await.expect("answered");

    // A fleet in which every machine has a GPU 0 of its own.
    let mut config = Config::default();
    config.gpu_scope = GpuScope::Host;
    let own = GpuPool::new(&locks, &config, Devices::discover(Some(1)).expect("one")).expect("a pool");
    let own = own.acquire().no_wait().await.expect("free");
    let name = own.guards()[0].name().to_string();
    let host = leasehold::Owner::default().host().to_owned();
    assert_eq!(name, format!("gpu_lock:{host}:0"));
    // Another lock, which is free too, at the latest when the waiters for any GPU have left its queue.
    locks.lock("gpu_lock:0").wait_up_to(LONG).await.expect("free").release().await.expect("answered");
    assert!(own.guards()[0].is_valid());
}

async fn a_pool_cleans_up_when_it_is_dropped(arena: Arena) {
    let locks = manager(&arena).await;
    let (told, mut tells) = unbounded_channel();
    let looker = locks.clone();
    let clean_up = CleanUp::new(async move |leaving: Leaving| {
        let _ = told.send((leaving.devices.len(), looker.is_locked("gpu_lock:1").await.expect("answered")));
    });
    drop(pool(&locks, 2).any(2).clean_up(clean_up).await.expect("free"));
    assert_eq!(timeout(LONG, tells.recv()).await.expect("in time"), Some((2, true)));
    until_free(&locks, "gpu_lock:0").await;
    until_free(&locks, "gpu_lock:1").await;
}

/// Requests for two GPUs by number and for any two must not deadlock with one GPU each.
async fn several_are_collected_without_a_deadlock(arena: Arena) {
    let inside = std::sync::Arc::new(Mutex::new([false; 2]));
    let mut tasks = Vec::new();
    for task in 0..4 {
        let locks = manager(&arena).await;
        let inside = inside.clone();
        tasks.push(tokio::spawn(async move {
            let gpus = pool(&locks, 2);
            for _ in 0..5 {
                let request = if task % 2 == 0 { gpus.any(2) } else { gpus.only(&[0, 1]).expect("here") };
                let held = request.await.expect("its turn");
                for id in held.ids() {
                    let was = std::mem::replace(&mut inside.lock().expect("no panic")[id as usize], true);
                    assert!(!was, "two on GPU {id}");
                }
                *inside.lock().expect("no panic") = [false; 2];
                held.release().await.expect("answered");
            }
        }));
    }
    for task in tasks {
        timeout(Duration::from_secs(60), task).await.expect("no deadlock").expect("no panic");
    }
}

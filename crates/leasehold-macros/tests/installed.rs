//! `#[lock]` without `locks = …` uses the installed manager. It has a file of its own, because a process has only one.

use leasehold::{Error, LockManager, current_fence, lock};

#[lock(key = "nightly")]
async fn nightly() -> Result<bool, Error> {
    Ok(current_fence().is_some())
}

#[tokio::test]
async fn the_attribute_needs_the_installed_manager() {
    let missed = nightly().await.expect_err("nothing is installed");
    assert_eq!(
        missed.to_string(),
        "no lock manager for \"nightly\": call `leasehold::install` at the start of the program, or use `#[lock(locks = …)]`"
    );
    let locks = LockManager::connect("memory:").await.expect("memory");
    leasehold::install(locks.clone()).expect("the first");
    assert!(nightly().await.expect("free"));
    let guard = locks.lock("nightly").await.expect("free");
    assert!(matches!(nightly().await, Err(Error::NotAcquired { .. })), "the same manager");
    drop(guard);
    let again = leasehold::install(locks).expect_err("once");
    assert!(again.to_string().contains("already installed"), "{again}");
}

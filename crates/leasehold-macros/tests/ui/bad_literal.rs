use leasehold::{Error, lock};

#[lock(
    key = 42,
    ttl_ms = "10s",
    wait_ms = -1,
    retry_ms = 0,
    renew = "yes",
    reentrant = 1,
    on_lost = "explode",
    on_unavailable = open
)]
async fn all_at_once() -> Result<(), Error> {
    Ok(())
}

#[lock(key = "a", ttl_ms = 10)]
async fn too_short() -> Result<(), Error> {
    Ok(())
}

#[lock(key = "a", ttl_ms = 86_400_001)]
async fn too_long() -> Result<(), Error> {
    Ok(())
}

#[lock(key = "a", wait_ms = 1.5)]
async fn fraction() -> Result<(), Error> {
    Ok(())
}

#[lock(key = "a", wait_ms = 99999999999999)]
async fn far() -> Result<(), Error> {
    Ok(())
}

#[lock(key = "a", max_hold_ms = 5_000)]
async fn pointless_cap() -> Result<(), Error> {
    Ok(())
}

fn main() {}

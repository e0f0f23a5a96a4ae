//! One option that cannot be read hides nothing that is wrong with the others.
use leasehold::{Error, gpu::gpu_lock, lock};

#[lock(reentrant, key = "a:{nobody}", ttl_ms 5, wait_ms = , renew = maybe, "b", on_lost: "cancel")]
fn all_of_them() -> Result<(), Error> {
    Ok(())
}

#[lock(key = "a" wait_ms = 1, ttl = 5)]
async fn no_comma() -> Result<(), Error> {
    Ok(())
}

#[gpu_lock(0, max_wait_time, lock_timeout = 0)]
async fn on_a_gpu() -> Result<(), Error> {
    Ok(())
}

fn main() {}

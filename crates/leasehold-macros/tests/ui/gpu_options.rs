//! Everything that can be wrong about the options of `#[gpu_lock]`, each at its place.
use leasehold::{Error, gpu::gpu_lock};

#[gpu_lock(max_wait_time = 300)]
async fn which() -> Result<(), Error> {
    Ok(())
}

#[gpu_lock(gpu_id = 0, max_wait = 300, gpu_id = 1)]
async fn unknown_and_twice() -> Result<(), Error> {
    Ok(())
}

#[gpu_lock(gpu_id = "0", max_wait_time = "5m", lock_timeout = 0, cleanup = 7, on_lost = "wait")]
async fn bad_literals() -> Result<(), Error> {
    Ok(())
}

#[gpu_lock(gpu_id = 0, cleanup_timeout = 5)]
async fn nothing_to_clean_up() -> Result<(), Error> {
    Ok(())
}

#[gpu_lock(0)]
async fn without_a_name() -> Result<(), Error> {
    Ok(())
}

fn main() {}

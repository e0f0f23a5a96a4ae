//! Functions that `#[gpu_lock]` cannot take.
use leasehold::{Error, gpu::gpu_lock};

#[gpu_lock(gpu_id = 0)]
fn not_async() -> Result<(), Error> {
    Ok(())
}

#[gpu_lock(gpu_id = 0)]
async fn nothing() {}

#[gpu_lock(gpu_id = 0)]
async fn not_a_result() -> u32 {
    1
}

#[gpu_lock(gpu_id = name)]
async fn not_a_number(name: String) -> Result<(), Error> {
    Ok(())
}

#[gpu_lock(gpu_id = 0)]
struct NotAFunction;

fn main() {}

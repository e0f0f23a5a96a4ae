use leasehold::{Error, lock};

#[lock(key = "a", ttl = 5, wait_ms = 1, wait_ms = 2)]
async fn unknown_and_twice() -> Result<(), Error> {
    Ok(())
}

#[lock]
async fn no_key() -> Result<(), Error> {
    Ok(())
}

#[lock("order:{id}")]
async fn bare_key(id: u32) -> Result<u32, Error> {
    Ok(id)
}

#[lock(key = "a", reentrant)]
async fn bare_option() -> Result<(), Error> {
    Ok(())
}

fn main() {}

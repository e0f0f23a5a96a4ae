use leasehold::{Error, LockManager, lock};

#[lock(key = "order:{ordr_id}:{self.id}", locks = locks)]
async fn pay(locks: &LockManager, order_id: u32) -> Result<u32, Error> {
    Ok(order_id)
}

#[lock(key = "order:{id}")]
async fn nothing() -> Result<(), Error> {
    Ok(())
}

fn main() {}

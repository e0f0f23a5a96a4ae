use leasehold::{Error, lock};

#[lock(key = "order:{}:{id:?}:{id + 1}:{id.name()}:{0}")]
async fn expressions(id: u32) -> Result<u32, Error> {
    Ok(id)
}

#[lock(key = "order:{ id}:{id. 0}:{id.4294967296}:{id.self}")]
async fn nearly(id: u32) -> Result<u32, Error> {
    Ok(id)
}

#[lock(key = "order:{id")]
async fn open(id: u32) -> Result<u32, Error> {
    Ok(id)
}

#[lock(key = "order:id}")]
async fn close(id: u32) -> Result<u32, Error> {
    Ok(id)
}

#[lock(key = "")]
async fn empty() -> Result<(), Error> {
    Ok(())
}

#[lock(key = "two\nlines")]
async fn lines() -> Result<(), Error> {
    Ok(())
}

fn main() {}

use leasehold::{Error, LockManager, lock};

struct Opaque {
    id: u32,
}

#[lock(key = "a:{opaque}", locks = locks)]
async fn not_display(locks: &LockManager, opaque: Opaque) -> Result<u32, Error> {
    Ok(opaque.id)
}

#[lock(key = "a:{opaque.number}", locks = locks)]
async fn no_such_field(locks: &LockManager, opaque: Opaque) -> Result<u32, Error> {
    Ok(opaque.id)
}

#[lock(key = "a", locks = name)]
async fn not_a_manager(name: &str) -> Result<usize, Error> {
    Ok(name.len())
}

fn main() {}

use leasehold::{Error, lock};

#[lock(key = "a")]
async fn nothing() {}

#[lock(key = "a")]
async fn tuple() -> (u32, Error) {
    unreachable!()
}

#[lock(key = "a")]
async fn opaque() -> impl std::fmt::Display {
    "x"
}

#[lock(key = "a")]
async fn number() -> u32 {
    7
}

#[lock(key = "a")]
async fn option() -> Option<u32> {
    None
}

fn main() {}

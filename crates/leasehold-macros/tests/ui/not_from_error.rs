use leasehold::lock;

struct MyError;

#[lock(key = "a")]
async fn other_error() -> Result<u32, MyError> {
    Err(MyError)
}

fn main() {}

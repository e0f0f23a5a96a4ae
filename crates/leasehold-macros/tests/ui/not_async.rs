use leasehold::{Error, lock};

#[lock(key = "a")]
fn not_async() -> Result<(), Error> {
    Ok(())
}

// Everything at once.
#[lock(key = "a:{nobody}", wait = 5)]
fn three_mistakes() -> Result<(), Error> {
    Ok(())
}

#[lock(key = "a")]
struct NotAFunction;

trait Trait {
    #[lock(key = "a")]
    async fn without_a_body(&self) -> Result<(), Error>;
}

fn main() {}

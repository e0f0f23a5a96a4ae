//! A writer that does not check whether it still has its lock, like a program that was stopped between the check and the write:
//! `writer LOCKS ACCOUNTS`. It acquires the lock, then writes each number that it reads.

use std::error::Error;
use std::io::BufRead;
use std::path::Path;
use std::time::Duration;

use fences::Accounts;
use leasehold::blocking::LockManager;
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [locks, accounts] = arguments.as_slice() else { return Err("usage: writer LOCKS ACCOUNTS".into()) };
    let accounts = Accounts::open(Path::new(accounts))?;
    let locks = LockManager::connect(locks)?;
    let guard = locks.lock("account:7").ttl(Duration::from_secs(1)).acquire()?;
    let fence = guard.fence().get();
    println!("{}", json!({ "granted": fence }));
    for line in std::io::stdin().lock().lines() {
        let written = accounts.write(fence, 7, line?.trim().parse()?)?;
        println!("{}", json!({ "written": written }));
    }
    Ok(())
}

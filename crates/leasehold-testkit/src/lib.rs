//! What leasehold's tests stand on: real servers, a fault proxy in front of them, worker processes,
//! and a history of who held what when, with the checkers that read it.
//!
//! Linux only. Everything listens on loopback, lives in temporary directories and is gone when its
//! value is dropped.

mod random;
mod resp;
pub mod server;
mod signal;

pub use server::RedisServer;

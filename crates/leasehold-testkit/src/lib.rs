//! What leasehold's tests stand on: real servers, a fault proxy in front of them, worker processes,
//! a history of who held what when with the checkers that read it, and an HTTP client of a few lines.
//!
//! Linux only. Everything listens on loopback, lives in temporary directories and is gone when its
//! value is dropped.

mod arena;
pub mod board;
pub mod certificates;
pub mod history;
pub mod http;
pub mod job;
pub mod proxy;
mod random;
mod resp;
pub mod server;
mod signal;
pub mod worker;

pub use arena::{Arena, Kind};
pub use board::{full_or, report};
pub use certificates::Authority;
pub use history::{History, HistoryWriter};
pub use proxy::FaultProxy;
pub use server::RedisServer;
pub use worker::WorkerProcess;

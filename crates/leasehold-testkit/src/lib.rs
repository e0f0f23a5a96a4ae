//! The tools of leasehold's tests: real servers, a fault proxy for them, worker processes, histories of holds with checkers,
//! and a small HTTP client.
//!
//! Linux only. Servers listen on loopback and keep their files in temporary directories; everything is removed on drop.

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

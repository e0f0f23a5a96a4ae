//! The rows of the fault board, and what is undone after a fault. Rows that count what the whole process has
//! open are in `ends.rs`, a program of its own.

mod cancel;
mod common;
mod full_disk;
mod holders;
mod input;
mod leases;
mod network;
mod replies;
mod server;
mod sqlite;
mod undoing;
mod waiting;

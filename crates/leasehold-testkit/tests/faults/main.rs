//! The rows of the fault board, and what is undone after a fault. Rows that count what the whole process has
//! open are in `ends.rs`, a program of its own.

mod cancel;
mod common;
mod demotion;
mod full_disk;
mod giving_up;
mod holders;
mod input;
mod leases;
mod losing;
mod network;
mod once;
mod replies;
mod server;
mod sqlite;
mod sqlite_places;
mod undoing;
mod waiting;

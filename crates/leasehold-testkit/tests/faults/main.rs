//! The rows of the fault board. Rows that count descriptors and threads of the whole process are in `ends.rs`, a program of its
//! own.

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

//! Black-box tests of the server: over HTTP, on every store.

mod auth;
mod events;
mod evict;
mod leases;
mod locks;
mod monitor;
mod openapi;
mod operating;
mod snapshot;
mod support;
mod tasks;

//! The server as its users see it: over HTTP, on every store.

mod described;
mod doors;
mod events;
mod evicting;
mod monitor;
mod operating;
mod reading;
mod snapshot;
mod support;
mod taking;
mod tasks;

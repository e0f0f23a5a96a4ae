//! The tests of the stores.
//!
//! They are one program, because a program per file costs more to build than to run.

mod agreement;
mod battery;
mod bindings;
mod bindings_agree;
mod extremes;
mod namespaces;
mod redis_link;
mod redis_long_values;
mod redis_store;
mod redis_tls;
mod sqlite_disk;
mod sqlite_processes;
mod sqlite_verbs;
mod support;

//! The public API: managers, guards, pools, elections, `once`.

mod blocking;
mod claiming;
mod elections;
mod gpus;
mod lock_attribute;
mod managers;
mod moments;
mod once;
mod pools;
mod pools_order;
mod pools_processes;
mod processes;
mod redis_py;
mod reentrant;
mod releasing;
mod seeing;
mod tokens;

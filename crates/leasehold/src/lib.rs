//! Locks that people can hold, see and trust.

pub mod clock;
pub mod error;
pub mod event;
pub mod facts;
mod lease;
mod machine;
pub mod store;

pub use error::{Error, Operation};
pub use facts::{Fence, HolderId, Invalid, KeySpace, LockName, Namespace, Owner, RawPattern, Token, Ttl};

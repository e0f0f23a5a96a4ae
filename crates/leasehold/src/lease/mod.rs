//! A [`Lease`] without a guard, the [`Terms`] of a request, and the values that describe leases: the secret [`Token`], the [`Ttl`], the [`Moment`]
//! until which a lease is proven, and why a value was refused ([`Invalid`]).

pub(crate) mod belief;
mod detached;
mod into_name;
pub(crate) mod terms;

pub use crate::clock::Moment;
pub use crate::facts::{Invalid, Token, Ttl};

pub use detached::Lease;
pub use into_name::IntoLockName;
pub use terms::Terms;

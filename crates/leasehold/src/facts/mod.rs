//! Names, owners, tokens, fences and ttls. Each is checked once, when it is created.

mod claim_id;
mod fence;
mod invalid;
mod name;
mod owner;
mod retention;
mod token;
mod ttl;

pub use claim_id::ClaimId;
pub use fence::Fence;
pub use invalid::Invalid;
pub(crate) use invalid::beginning;
pub use name::{BindingKind, KeySpace, LockName, Namespace, RawPattern};
pub use owner::Owner;
pub use retention::Retention;
pub use token::{HolderId, Token};
pub use ttl::Ttl;

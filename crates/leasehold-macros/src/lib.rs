//! The attribute `#[lock(...)]` of `leasehold`; use it through that crate (feature `macros`, on by
//! default), where it is documented.
//!
//! A shell around three steps: `attr` reads the options, `template` the key, `expand` writes
//! the function. Whatever is wrong is told at its place, all at once.

mod attr;
mod expand;
mod template;

use proc_macro::TokenStream;

/// Runs an async function under a lock. `leasehold::lock` documents its options.
#[proc_macro_attribute]
pub fn lock(options: TokenStream, function: TokenStream) -> TokenStream {
    expand::lock(options.into(), function.into()).into()
}

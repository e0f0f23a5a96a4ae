//! The attributes `#[lock(...)]` and `#[gpu_lock(...)]` of `leasehold`. Use them through that crate (feature `macros`, on by
//! default), which documents them.
//!
//! `attr` and `gpu` parse the options, `template` parses the key, and `expand` writes the function. All problems are
//! reported at once, each at its place.

mod attr;
mod expand;
mod gpu;
mod template;

use proc_macro::TokenStream;

/// Runs an async function under a lock. `leasehold::lock` documents its options.
#[proc_macro_attribute]
pub fn lock(options: TokenStream, function: TokenStream) -> TokenStream {
    expand::under(attr::Options::parse(options.into()), function.into()).into()
}

/// Runs an async function under the lock of a GPU. `leasehold::gpu::gpu_lock` documents its options.
#[proc_macro_attribute]
pub fn gpu_lock(options: TokenStream, function: TokenStream) -> TokenStream {
    expand::under(gpu::GpuOptions::parse(options.into()), function.into()).into()
}

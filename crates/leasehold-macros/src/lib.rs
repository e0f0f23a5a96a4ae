//! The attributes `#[lock(...)]` and `#[gpu_lock(...)]` of `leasehold`; use them through that crate (feature
//! `macros`, on by default), where they are documented.
//!
//! A shell around three steps: `attr` (and `gpu`) reads the options, `template` the key, `expand` writes
//! the function. Whatever is wrong is told at its place, all at once.

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

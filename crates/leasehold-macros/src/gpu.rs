//! The options of `#[gpu_lock(...)]`. Times are in seconds, as in the configuration.

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Error, Expr, ExprLit, Ident, Lit, Signature};

use crate::attr::{Parsed, Written, choice, each, whole};
use crate::expand::{Attribute, optional};
use crate::template::combine;

/// The options of one attribute. Options that are not set have the values of the configuration.
pub(crate) struct GpuOptions {
    gpu_id: Option<Expr>,
    /// The manager; `None` for the installed one.
    locks: Option<Expr>,
    max_wait_s: Option<u64>,
    lock_timeout_s: Option<u64>,
    clean_up: Option<Expr>,
    clean_up_timeout_s: Option<u64>,
    cancel_on_loss: bool,
}

const KNOWN: &str = "`gpu_id`, `locks`, `max_wait_time`, `lock_timeout`, `cleanup`, `cleanup_timeout` and `on_lost`";
const DAY_S: u64 = 24 * 60 * 60;
const YEAR_S: u64 = 365 * DAY_S;

impl GpuOptions {
    /// Parses the options. The error contains all problems.
    pub(crate) fn parse(tokens: TokenStream) -> (Self, Option<Error>) {
        let mut options = Self {
            gpu_id: None,
            locks: None,
            max_wait_s: None,
            lock_timeout_s: None,
            clean_up: None,
            clean_up_timeout_s: None,
            cancel_on_loss: true,
        };
        let Parsed { list, mut errors, complete } =
            each(tokens, "gpu_id = 0", |name, written| options.take(name, written));
        let option = |name: &str| list.iter().find(|written| written.name == name);
        if complete && option("gpu_id").is_none() {
            let missing = "`#[gpu_lock]` requires the number of a GPU: `#[gpu_lock(gpu_id = 0)]`";
            errors.push(Error::new(Span::call_site(), missing));
        }
        if let (true, Some(written), None) = (complete, option("cleanup_timeout"), option("cleanup")) {
            errors.push(Error::new(written.name.span(), "`cleanup_timeout` requires `cleanup`"));
        }
        (options, errors.into_iter().reduce(combine))
    }

    fn take(&mut self, name: &str, Written { name: at, value }: &Written) -> Result<(), Error> {
        match name {
            "gpu_id" => {
                if let Expr::Lit(ExprLit { lit, .. }) = value
                    && !matches!(lit, Lit::Int(number) if number.base10_parse::<u32>().is_ok())
                {
                    return Err(Error::new(value.span(), "expected the number of a GPU, such as `0` or a parameter"));
                }
                self.gpu_id = Some(value.clone());
            }
            "locks" => self.locks = Some(value.clone()),
            "max_wait_time" => self.max_wait_s = Some(seconds(value, YEAR_S, "at most a year")?),
            "lock_timeout" => {
                self.lock_timeout_s = Some(seconds(value, DAY_S, "at most a day")?);
                if self.lock_timeout_s == Some(0) {
                    return Err(Error::new(value.span(), "a lease of 0 seconds protects nothing"));
                }
            }
            "cleanup" => {
                if let Expr::Lit(ExprLit { lit, .. }) = value
                    && !matches!(lit, Lit::Str(_))
                {
                    return Err(Error::new(value.span(), "expected a function, or a command as text"));
                }
                self.clean_up = Some(value.clone());
            }
            "cleanup_timeout" => self.clean_up_timeout_s = Some(seconds(value, DAY_S, "at most a day")?),
            "on_lost" => self.cancel_on_loss = choice(value, ["cancel", "continue"])? == 0,
            _ => {
                return Err(Error::new(
                    at.span(),
                    format!("`{name}` is not an option of `#[gpu_lock]`; the options are {KNOWN}"),
                ));
            }
        }
        Ok(())
    }

    fn clean_up(&self) -> TokenStream {
        let within = self.clean_up_timeout_s.map(|seconds| {
            quote! { .within(::core::time::Duration::from_secs(#seconds)) }
        });
        optional(self.clean_up.as_ref().map(|value| match value {
            Expr::Lit(command) => quote_spanned! {value.span()=>
                ::leasehold::gpu::CleanUp::command(["sh", "-c", #command]) #within
            },
            work => quote_spanned! {value.span()=> ::leasehold::gpu::CleanUp::new(#work) #within },
        }))
    }
}

fn seconds(value: &Expr, highest: u64, at_most: &str) -> Result<u64, Error> {
    whole(value, highest, &format!("expected a whole number of seconds such as `300`, {at_most}"))
}

impl Attribute for GpuOptions {
    const NAME: &'static str = "#[gpu_lock]";
    const RESULT: &'static str = "GpuLockResult";

    fn lock(&self, _: &[Ident], _: &Signature) -> Option<Result<TokenStream, Error>> {
        self.gpu_id.as_ref().map(|id| Ok(quote_spanned! {id.span()=> #id }))
    }

    fn call(&self, gpu_id: &TokenStream, from_error: &TokenStream, body: &TokenStream) -> TokenStream {
        let cancel_on_loss = self.cancel_on_loss;
        let max_wait_s = optional(self.max_wait_s);
        let lock_timeout_s = optional(self.lock_timeout_s);
        let clean_up = self.clean_up();
        let locks = match &self.locks {
            Some(locks) => quote_spanned! {locks.span()=> {
                let __leasehold_locks: &::leasehold::LockManager = &(#locks);
                ::core::option::Option::Some(::core::clone::Clone::clone(__leasehold_locks))
            }},
            None => quote! { ::leasehold::LockManager::installed() },
        };
        quote! {
            let __leasehold_call = ::leasehold::__private::GpuCall {
                gpu_id: { let __leasehold_gpu: u32 = #gpu_id; __leasehold_gpu },
                locks: #locks,
                max_wait_s: #max_wait_s,
                lock_timeout_s: #lock_timeout_s,
                clean_up: #clean_up,
                cancel_on_loss: #cancel_on_loss,
            };
            ::leasehold::__private::run_on_gpu(__leasehold_call, #from_error, #body).await
        }
    }
}

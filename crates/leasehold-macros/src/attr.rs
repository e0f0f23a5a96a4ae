//! The options of `#[lock(...)]`, and the syntax of options.

use proc_macro2::{Span, TokenStream, TokenTree};
use syn::parse::{ParseStream, Parser};
use syn::spanned::Spanned;
use syn::{Error, Expr, ExprLit, Ident, Lit, LitStr, Token};

use crate::template::{Template, combine};

/// The options of one attribute.
pub(crate) struct Options {
    pub(crate) key: Option<Template>,
    /// The manager; `None` for the installed one.
    pub(crate) locks: Option<Expr>,
    pub(crate) ttl_ms: u64,
    pub(crate) wait_ms: u64,
    pub(crate) retry_ms: u64,
    pub(crate) max_hold_ms: Option<u64>,
    pub(crate) renew: bool,
    pub(crate) reentrant: bool,
    pub(crate) cancel_on_loss: bool,
    /// Whether the function runs without a lock when the store is unreachable; `None` for the manager's option.
    pub(crate) open: Option<bool>,
}

const KNOWN: &str = "`key`, `locks`, `ttl_ms`, `wait_ms`, `retry_ms`, `renew`, `max_hold_ms`, `reentrant`, `on_lost` and \
                     `on_unavailable`";
/// The bounds of a lease, the same as in the library.
const TTL_MS: std::ops::RangeInclusive<u64> = 50..=24 * 60 * 60 * 1000;
/// The longest wait. A longer one is probably a mistake in the unit.
const YEAR_MS: u64 = 365 * 24 * 60 * 60 * 1000;

impl Options {
    /// Parses the options. The error contains all problems.
    pub(crate) fn parse(tokens: TokenStream) -> (Self, Option<Error>) {
        let mut options = Self {
            key: None,
            locks: None,
            ttl_ms: 10_000,
            wait_ms: 0,
            retry_ms: 50,
            max_hold_ms: None,
            renew: false,
            reentrant: false,
            cancel_on_loss: true,
            open: None,
        };
        let example = "key = \"order:{order_id}\"";
        let Parsed { list, mut errors, complete } = each(tokens, example, |name, written| options.take(name, written));
        if complete && !list.iter().any(|written| written.name == "key") {
            let missing = "`#[lock]` requires a key: `#[lock(key = \"order:{order_id}\")]`";
            errors.push(Error::new(Span::call_site(), missing));
        }
        if let Some(written) = list.iter().find(|written| written.name == "max_hold_ms")
            && !options.renew
            && complete
        {
            let problem = "`max_hold_ms` requires `renew = true`: without it the lease ends after `ttl_ms`";
            errors.push(Error::new(written.name.span(), problem));
        }
        (options, errors.into_iter().reduce(combine))
    }

    fn take(&mut self, name: &str, Written { name: at, value }: &Written) -> Result<(), Error> {
        match name {
            "key" => self.key = Some(Template::parse(text(value, "text such as \"order:{order_id}\"")?)?),
            "locks" => self.locks = Some(value.clone()),
            "ttl_ms" => {
                self.ttl_ms = number(value)?;
                if !TTL_MS.contains(&self.ttl_ms) {
                    return Err(Error::new(value.span(), "a lease is 50 ms to 24 h (86_400_000)"));
                }
            }
            "wait_ms" => self.wait_ms = number(value)?,
            "retry_ms" => {
                self.retry_ms = number(value)?;
                if self.retry_ms == 0 {
                    return Err(Error::new(value.span(), "a retry interval of 0 would be a busy loop"));
                }
            }
            "max_hold_ms" => self.max_hold_ms = Some(number(value)?),
            "renew" => self.renew = boolean(value)?,
            "reentrant" => self.reentrant = boolean(value)?,
            "on_lost" => self.cancel_on_loss = choice(value, ["cancel", "continue"])? == 0,
            "on_unavailable" => self.open = Some(choice(value, ["closed", "open"])? == 1),
            _ => {
                return Err(Error::new(
                    at.span(),
                    format!("`{name}` is not an option of `#[lock]`; the options are {KNOWN}"),
                ));
            }
        }
        Ok(())
    }
}

/// A parsed list of options.
pub(crate) struct Parsed {
    pub(crate) list: Vec<Written>,
    pub(crate) errors: Vec<Error>,
    /// Whether the whole list was parsed. Otherwise a missing option may be in the rest.
    pub(crate) complete: bool,
}

/// Parses a list of options and reports all problems. Each option may be set once.
pub(crate) fn each(
    tokens: TokenStream,
    example: &'static str,
    mut take: impl FnMut(&str, &Written) -> Result<(), Error>,
) -> Parsed {
    let mut read = Parsed { list: Vec::new(), errors: Vec::new(), complete: true };
    let parse = |input: ParseStream<'_>| {
        while !input.is_empty() {
            match Written::parse(input, example) {
                Ok(written) => read.list.push(written),
                Err(error) => {
                    read.errors.push(error);
                    read.complete = false;
                    skip(input)?;
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(())
    };
    if let Err(error) = parse.parse2(tokens) {
        read.errors.push(error);
        read.complete = false;
    }
    let mut names: Vec<String> = Vec::new();
    for written in &read.list {
        let name = written.name.to_string();
        if names.contains(&name) {
            read.errors.push(Error::new(written.name.span(), format!("`{name}` is set twice")));
            continue;
        }
        if let Err(error) = take(&name, written) {
            read.errors.push(error);
        }
        names.push(name);
    }
    read
}

/// Skips to the next option.
fn skip(input: ParseStream<'_>) -> syn::Result<()> {
    while !input.is_empty() && !input.peek(Token![,]) {
        input.parse::<TokenTree>()?;
    }
    Ok(())
}

/// `name = value`
pub(crate) struct Written {
    pub(crate) name: Ident,
    pub(crate) value: Expr,
}

impl Written {
    fn parse(input: ParseStream<'_>, example: &str) -> syn::Result<Self> {
        if input.peek(Lit) {
            let literal: Lit = input.parse()?;
            return Err(Error::new(literal.span(), format!("expected `name = value`, such as `{example}`")));
        }
        let name: Ident = input.parse()?;
        if !input.peek(Token![=]) {
            return Err(Error::new(name.span(), format!("`{name}` requires a value: `{name} = …`")));
        }
        input.parse::<Token![=]>()?;
        let written = Self { name, value: input.parse()? };
        if !input.is_empty() && !input.peek(Token![,]) {
            return Err(input.error("expected a comma between two options"));
        }
        Ok(written)
    }
}

pub(crate) fn text(value: &Expr, wanted: &str) -> Result<LitStr, Error> {
    match value {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Ok(text.clone()),
        _ => Err(Error::new(value.span(), format!("expected {wanted}"))),
    }
}

fn number(value: &Expr) -> Result<u64, Error> {
    whole(value, YEAR_MS, "expected a whole number of milliseconds such as `15_000`, at most a year")
}

/// Parses a whole number up to `highest`. `expected` is the error text.
pub(crate) fn whole(value: &Expr, highest: u64, expected: &str) -> Result<u64, Error> {
    let wrong = || Error::new(value.span(), expected);
    match value {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) if number.suffix().is_empty() || number.suffix() == "u64" => {
            number.base10_parse().ok().filter(|&number| number <= highest).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

fn boolean(value: &Expr) -> Result<bool, Error> {
    match value {
        Expr::Lit(ExprLit { lit: Lit::Bool(boolean), .. }) => Ok(boolean.value),
        _ => Err(Error::new(value.span(), "expected `true` or `false`")),
    }
}

/// Parses one of two words and returns its index.
pub(crate) fn choice(value: &Expr, words: [&str; 2]) -> Result<usize, Error> {
    let wanted = format!("\"{}\" or \"{}\"", words[0], words[1]);
    let text = text(value, &wanted)?;
    let found = words.iter().position(|word| *word == text.value());
    found.ok_or_else(|| Error::new(text.span(), format!("expected {wanted}")))
}

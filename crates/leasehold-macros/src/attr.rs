//! The options of `#[lock(...)]`, and how options are written.

use proc_macro2::{Span, TokenStream, TokenTree};
use syn::parse::{ParseStream, Parser};
use syn::spanned::Spanned;
use syn::{Error, Expr, ExprLit, Ident, Lit, LitStr, Token};

use crate::template::{Template, combine};

/// What the attribute says, with what it says by default.
pub(crate) struct Options {
    pub(crate) key: Option<Template>,
    /// The manager; the process-wide one when nobody says.
    pub(crate) locks: Option<Expr>,
    pub(crate) ttl_ms: u64,
    pub(crate) wait_ms: u64,
    pub(crate) retry_ms: u64,
    pub(crate) max_hold_ms: Option<u64>,
    pub(crate) renew: bool,
    pub(crate) reentrant: bool,
    pub(crate) cancel_on_loss: bool,
    /// Whether the function runs without protection when the store is unreachable; the manager's own
    /// rule when nobody says.
    pub(crate) open: Option<bool>,
}

const KNOWN: &str = "`key`, `locks`, `ttl_ms`, `wait_ms`, `retry_ms`, `renew`, `max_hold_ms`, `reentrant`, `on_lost` and \
                     `on_unavailable`";
/// The bounds of a lease, as the library has them.
const TTL_MS: std::ops::RangeInclusive<u64> = 50..=24 * 60 * 60 * 1000;
/// Beyond a year a wait is a mistake in the unit.
const YEAR_MS: u64 = 365 * 24 * 60 * 60 * 1000;

impl Options {
    /// Reads the options; the error, if any, holds all of them.
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
        let Read { list, mut errors, all } = each(tokens, example, |name, written| options.take(name, written));
        if all && !list.iter().any(|written| written.name == "key") {
            let missing = "`#[lock]` needs a key: `#[lock(key = \"order:{order_id}\")]`";
            errors.push(Error::new(Span::call_site(), missing));
        }
        if let Some(written) = list.iter().find(|written| written.name == "max_hold_ms")
            && !options.renew
            && all
        {
            let problem = "without `renew = true` the lease ends after `ttl_ms` anyway";
            errors.push(Error::new(written.name.span(), problem));
        }
        (options, errors.into_iter().reduce(combine))
    }

    fn take(&mut self, name: &str, Written { name: at, value }: &Written) -> Result<(), Error> {
        match name {
            "key" => self.key = Some(Template::parse(text(value, "a text such as \"order:{order_id}\"")?)?),
            "locks" => self.locks = Some(value.clone()),
            "ttl_ms" => {
                self.ttl_ms = number(value)?;
                if !TTL_MS.contains(&self.ttl_ms) {
                    return Err(Error::new(value.span(), "a lease lasts from 50 ms to 24 h (86_400_000)"));
                }
            }
            "wait_ms" => self.wait_ms = number(value)?,
            "retry_ms" => {
                self.retry_ms = number(value)?;
                if self.retry_ms == 0 {
                    return Err(Error::new(value.span(), "a pause of 0 between two tries would be a busy loop"));
                }
            }
            "max_hold_ms" => self.max_hold_ms = Some(number(value)?),
            "renew" => self.renew = truth(value)?,
            "reentrant" => self.reentrant = truth(value)?,
            "on_lost" => self.cancel_on_loss = choice(value, ["cancel", "continue"])? == 0,
            "on_unavailable" => self.open = Some(choice(value, ["closed", "open"])? == 1),
            _ => return Err(Error::new(at.span(), format!("`{name}` is no option of `#[lock]`; there are {KNOWN}"))),
        }
        Ok(())
    }
}

/// What was read of a list of options.
pub(crate) struct Read {
    pub(crate) list: Vec<Written>,
    pub(crate) errors: Vec<Error>,
    /// Whether all of it could be read: what is missing may stand in the rest.
    pub(crate) all: bool,
}

/// Reads a list of options, each of them once, and finds everything that is wrong with it.
pub(crate) fn each(
    tokens: TokenStream,
    example: &'static str,
    mut take: impl FnMut(&str, &Written) -> Result<(), Error>,
) -> Read {
    let mut read = Read { list: Vec::new(), errors: Vec::new(), all: true };
    let parse = |input: ParseStream<'_>| {
        while !input.is_empty() {
            match Written::parse(input, example) {
                Ok(written) => read.list.push(written),
                Err(error) => {
                    read.errors.push(error);
                    read.all = false;
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
        read.all = false;
    }
    let mut names: Vec<String> = Vec::new();
    for written in &read.list {
        let name = written.name.to_string();
        if names.contains(&name) {
            read.errors.push(Error::new(written.name.span(), format!("`{name}` is said twice")));
            continue;
        }
        if let Err(error) = take(&name, written) {
            read.errors.push(error);
        }
        names.push(name);
    }
    read
}

/// Goes on to the next option.
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
            return Err(Error::new(literal.span(), format!("say what this is: `{example}`")));
        }
        let name: Ident = input.parse()?;
        if !input.peek(Token![=]) {
            return Err(Error::new(name.span(), format!("`{name}` needs a value: `{name} = …`")));
        }
        input.parse::<Token![=]>()?;
        let written = Self { name, value: input.parse()? };
        if !input.is_empty() && !input.peek(Token![,]) {
            return Err(input.error("a comma belongs between two options"));
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

/// A whole number up to a highest one, or what is expected instead.
pub(crate) fn whole(value: &Expr, highest: u64, expected: &str) -> Result<u64, Error> {
    let wrong = || Error::new(value.span(), expected);
    match value {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) if number.suffix().is_empty() || number.suffix() == "u64" => {
            number.base10_parse().ok().filter(|&number| number <= highest).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

fn truth(value: &Expr) -> Result<bool, Error> {
    match value {
        Expr::Lit(ExprLit { lit: Lit::Bool(truth), .. }) => Ok(truth.value),
        _ => Err(Error::new(value.span(), "expected `true` or `false`")),
    }
}

/// Which of two words it is.
pub(crate) fn choice(value: &Expr, words: [&str; 2]) -> Result<usize, Error> {
    let wanted = format!("\"{}\" or \"{}\"", words[0], words[1]);
    let text = text(value, &wanted)?;
    let found = words.iter().position(|word| *word == text.value());
    found.ok_or_else(|| Error::new(text.span(), format!("expected {wanted}")))
}

//! Expands an attribute: the original function with its body under a lock.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::visit_mut::VisitMut;
use syn::{
    Block, Error, Expr, FnArg, GenericArgument, Ident, ItemFn, Pat, PatIdent, PathArguments, ReturnType, Signature,
    Stmt, Type, TypeParamBound,
};

use crate::attr::Options;
use crate::template::{Piece, Template, combine};

/// The differences between the attributes.
pub(crate) trait Attribute {
    /// The attribute as it is written.
    const NAME: &'static str;
    /// The trait of the function's return type. Its name appears in the compiler's messages.
    const RESULT: &'static str;

    /// Returns an expression for the lock, which can use the parameters of the function; `None` when the option is missing.
    fn lock(&self, names: &[Ident], sig: &Signature) -> Option<Result<TokenStream, Error>>;

    /// Returns the call that runs a body (a future) under that lock. `from_error` converts an error into the function's return
    /// type.
    fn call(&self, lock: &TokenStream, from_error: &TokenStream, body: &TokenStream) -> TokenStream;
}

/// Returns the expanded function, or all problems with it.
pub(crate) fn under<A: Attribute>((options, wrong_options): (A, Option<Error>), function: TokenStream) -> TokenStream {
    let expanded = match syn::parse2::<ItemFn>(function.clone()) {
        Ok(item) => expand(&options, item),
        Err(_) => Err(not_a_function::<A>(&function)),
    };
    match (expanded, wrong_options) {
        (Ok(expanded), None) => expanded,
        (outcome, wrong_options) => {
            let error =
                [wrong_options, outcome.err()].into_iter().flatten().reduce(combine).map(|e| e.to_compile_error());
            // The unchanged function is kept, so that its callers do not cause further errors.
            quote! { #error #function }
        }
    }
}

fn not_a_function<A: Attribute>(tokens: &TokenStream) -> Error {
    let problem = match syn::parse2::<syn::TraitItemFn>(tokens.clone()) {
        Ok(_) => format!("`{}` needs a body to run under the lock: put it on the implementation", A::NAME),
        Err(_) => format!("`{}` can only be used on an `async fn`", A::NAME),
    };
    // At the attribute, because the item may be long.
    Error::new(Span::call_site(), problem)
}

/// The part of a function that runs under the lock.
struct Body<'a> {
    /// The return type.
    output: &'a Type,
    statements: Vec<&'a Stmt>,
    /// Statements before the lock that bind parameters.
    bindings: Vec<&'a Stmt>,
}

fn expand<A: Attribute>(options: &A, item: ItemFn) -> Result<TokenStream, Error> {
    let ItemFn { attrs, vis, modifiers: _, sig, block } = &item;
    let boxed = boxed(sig, block);
    let mut errors = Vec::new();
    let output = match (&sig.asyncness, &boxed, &sig.output) {
        (_, Some((output, _)), _) => Some(*output),
        (None, None, _) => {
            let problem = format!("`{}` requires an `async fn`, because acquiring a lock means waiting", A::NAME);
            errors.push(Error::new(sig.fn_token.span(), problem));
            None
        }
        (Some(_), None, ReturnType::Type(_, output)) => Some(&**output),
        (Some(_), None, ReturnType::Default) => {
            errors
                .push(Error::new(sig.ident.span(), format!("this function returns nothing: {}", needs_result::<A>())));
            None
        }
    };
    if let Some(output) = output
        && !matches!(output, Type::Path(_) | Type::Macro(_) | Type::Paren(_) | Type::Group(_))
    {
        errors.push(Error::new(output.span(), format!("this is not a `Result`: {}", needs_result::<A>())));
    }
    let body = match (&boxed, output) {
        (Some((_, inside)), Some(output)) => Some(inside_box(inside, output)),
        (None, Some(output)) => Some(Body { output, statements: block.stmts.iter().collect(), bindings: Vec::new() }),
        _ => None,
    };
    let names = names(sig, body.as_ref().map_or(&[], |body| &body.bindings));
    let key = match options.lock(&names, sig) {
        Some(Ok(key)) => Some(key),
        Some(Err(error)) => {
            errors.push(error);
            None
        }
        // `parse` has reported the missing option.
        None => None,
    };
    if let Some(error) = errors.into_iter().reduce(combine) {
        return Err(error);
    }
    let (Some(body), Some(key)) = (body, key) else {
        return Ok(TokenStream::new());
    };
    let locked = locked(options, &key, &body);
    let whole = match boxed {
        Some(_) => quote! { { ::std::boxed::Box::pin(async move { #locked }) } },
        None => quote! { { #locked } },
    };
    Ok(quote! { #(#attrs)* #vis #sig #whole })
}

fn needs_result<A: Attribute>() -> String {
    format!(
        "a function under `{}` returns `Result<T, E>` with `E: From<leasehold::Error>`, which reports \
         that the lock was not acquired or was lost",
        A::NAME
    )
}

/// Wraps the body in a lock.
fn locked<A: Attribute>(options: &A, lock: &TokenStream, body: &Body<'_>) -> TokenStream {
    let Body { statements, bindings, output } = body;
    let mut output = (*output).clone();
    HideImplTrait.visit_type_mut(&mut output);
    let result = Ident::new(A::RESULT, Span::call_site());
    let from_error = quote_spanned! {output.span()=> <#output as ::leasehold::__private::#result>::from_error };
    let body = quote! {
        async move {
            // Gives the body the return type of the signature, as in an async function.
            #[allow(
                unknown_lints, unreachable_code, clippy::diverging_sub_expression, clippy::empty_loop,
                clippy::let_unit_value, clippy::let_with_type_underscore, clippy::needless_return,
                clippy::unreachable
            )]
            if false {
                let __leasehold_output: #output = loop {};
                return __leasehold_output;
            }
            #(#statements)*
        }
    };
    let call = options.call(lock, &from_error, &body);
    quote! { #(#bindings)* #call }
}

impl Attribute for Options {
    const NAME: &'static str = "#[lock]";
    const RESULT: &'static str = "LockResult";

    fn lock(&self, names: &[Ident], sig: &Signature) -> Option<Result<TokenStream, Error>> {
        self.key.as_ref().map(|key| format_key(key, names, sig))
    }

    fn call(&self, key: &TokenStream, from_error: &TokenStream, body: &TokenStream) -> TokenStream {
        let Self { ttl_ms, wait_ms, retry_ms, renew, reentrant, cancel_on_loss, .. } = self;
        let max_hold_ms = optional(self.max_hold_ms);
        let open = optional(self.open);
        let request = match &self.locks {
            Some(locks) => quote_spanned! {locks.span()=> {
                let __leasehold_locks: &::leasehold::LockManager = &(#locks);
                ::leasehold::__private::request(__leasehold_locks, __leasehold_key)
            }},
            None => quote! { ::leasehold::__private::installed(__leasehold_key) },
        };
        quote! {
            let __leasehold_request = {
                let __leasehold_key: ::std::string::String = #key;
                #request
            };
            ::leasehold::__private::run(
                __leasehold_request,
                ::leasehold::__private::Call {
                    ttl_ms: #ttl_ms,
                    wait_ms: #wait_ms,
                    retry_ms: #retry_ms,
                    max_hold_ms: #max_hold_ms,
                    renew: #renew,
                    reentrant: #reentrant,
                    cancel_on_loss: #cancel_on_loss,
                    open: #open,
                },
                #from_error,
                #body,
            )
            .await
        }
    }
}

pub(crate) fn optional<T: ToTokens>(value: Option<T>) -> TokenStream {
    match value {
        Some(value) => quote! { ::core::option::Option::Some(#value) },
        None => quote! { ::core::option::Option::None },
    }
}

/// Returns `format!("order:{}", order_id)`, with the span of the key on every parameter.
fn format_key(key: &Template, names: &[Ident], sig: &Signature) -> Result<TokenStream, Error> {
    let at = key.literal.span();
    let mut format = String::new();
    let mut values = Vec::new();
    let mut errors = Vec::new();
    for piece in &key.pieces {
        match piece {
            Piece::Text(text) => format.push_str(&text.replace('{', "{{").replace('}', "}}")),
            Piece::Param(path) => {
                format.push_str("{}");
                match names.iter().rev().find(|name| name.unraw() == path[0]) {
                    Some(name) => {
                        // Located at the key, and resolved like the parameter.
                        let span = at.resolved_at(name.span());
                        let mut first = name.clone();
                        first.set_span(span);
                        let fields = path[1..].iter().map(|field| field_at(field, span));
                        values.push(quote_spanned! {span=> #first #(. #fields)* });
                    }
                    None => errors.push(Error::new(at, unknown_parameter(&path[0], names, sig))),
                }
            }
        }
    }
    match errors.into_iter().reduce(combine) {
        Some(error) => Err(error),
        None => Ok(quote_spanned! {at=> ::std::format!(#format #(, #values)*) }),
    }
}

fn field_at(field: &str, span: Span) -> TokenStream {
    match (field.parse(), syn::parse_str::<Ident>(field)) {
        (Ok(index), _) => syn::Index { index, span }.into_token_stream(),
        (_, Ok(_)) => Ident::new(field, span).into_token_stream(),
        // A keyword.
        _ => Ident::new_raw(field, span).into_token_stream(),
    }
}

fn unknown_parameter(name: &str, names: &[Ident], sig: &Signature) -> String {
    if name == "self" {
        return "`{self}` in the key, but this function has no `self`".to_owned();
    }
    let known: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    let function = &sig.ident;
    match known.as_slice() {
        [] => format!("`{{{name}}}` in the key, but `{function}` has no parameters"),
        known => format!(
            "`{{{name}}}` in the key, but `{function}` has no parameter of that name; the parameters are {}",
            known.join(", ")
        ),
    }
}

/// Returns every name that the parameters bind, including `self`.
fn names(sig: &Signature, bindings: &[&Stmt]) -> Vec<Ident> {
    struct Names(Vec<Ident>);
    impl<'ast> Visit<'ast> for Names {
        fn visit_pat_ident(&mut self, pat: &'ast PatIdent) {
            self.0.push(pat.ident.clone());
            syn::visit::visit_pat_ident(self, pat);
        }
    }
    let mut names = Names(Vec::new());
    for input in &sig.inputs {
        match input {
            FnArg::Receiver(receiver) => names.0.push(Ident::new("self", receiver.self_token.span())),
            FnArg::Typed(typed) => names.visit_pat(&typed.pat),
        }
    }
    for binding in bindings {
        if let Stmt::Local(local) = binding {
            names.visit_pat(&local.pat);
        }
    }
    names.0
}

/// Recognises `fn f(…) -> Pin<Box<dyn Future<Output = R> …>> { Box::pin(async move { … }) }`, which `#[async_trait]` makes of
/// an async method before this attribute runs. Returns `R` and the inner block.
fn boxed<'a>(sig: &'a Signature, block: &'a Block) -> Option<(&'a Type, &'a Block)> {
    if sig.asyncness.is_some() {
        return None;
    }
    let ReturnType::Type(_, output) = &sig.output else { return None };
    let Type::TraitObject(future) = argument(argument(output, "Pin")?, "Box")? else { return None };
    let output = future.bounds.iter().find_map(|bound| match bound {
        TypeParamBound::Trait(bound) => {
            let segment = bound.path.segments.last().filter(|segment| segment.ident == "Future")?;
            let PathArguments::AngleBracketed(arguments) = &segment.arguments else { return None };
            arguments.args.iter().find_map(|argument| match argument {
                GenericArgument::AssocType(assoc) if assoc.ident == "Output" => Some(&assoc.ty),
                _ => None,
            })
        }
        _ => None,
    })?;
    let Some(Stmt::Expr(Expr::Call(call), None)) = block.stmts.last() else { return None };
    let Expr::Path(function) = &*call.func else { return None };
    let is_pin = function.path.segments.last().is_some_and(|segment| segment.ident == "pin");
    match call.args.first() {
        Some(Expr::Async(inside)) if is_pin && block.stmts.len() == 1 => Some((output, &inside.block)),
        _ => None,
    }
}

/// Returns `T` of `Name<T>`.
fn argument<'a>(ty: &'a Type, name: &str) -> Option<&'a Type> {
    let Type::Path(path) = ty else { return None };
    let segment = path.path.segments.last().filter(|segment| segment.ident == name)?;
    let PathArguments::AngleBracketed(arguments) = &segment.arguments else { return None };
    match arguments.args.first()? {
        GenericArgument::Type(inner) => Some(inner),
        _ => None,
    }
}

/// Splits the inner block: the statements that destructure parameters must come before the lock, because the key uses their
/// names.
fn inside_box<'a>(block: &'a Block, output: &'a Type) -> Body<'a> {
    // `async_trait` puts the original body into the first `let` with a type.
    let typed = |stmt: &Stmt| matches!(stmt, Stmt::Local(local) if matches!(local.pat, Pat::Type(_)));
    let end = block.stmts.iter().position(typed).unwrap_or(0);
    let destructures = |stmt: &Stmt| matches!(stmt, Stmt::Local(local) if !matches!(local.pat, Pat::Ident(_)));
    let (before, body) = block.stmts.split_at(end);
    let (bindings, others): (Vec<&Stmt>, Vec<&Stmt>) = before.iter().partition(|stmt| destructures(stmt));
    Body { output, statements: others.into_iter().chain(body).collect(), bindings }
}

/// Replaces `impl Trait`, which is not allowed in a body, with `_`.
struct HideImplTrait;

impl VisitMut for HideImplTrait {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        if matches!(ty, Type::ImplTrait(_)) {
            *ty = syn::parse_quote!(_);
        } else {
            syn::visit_mut::visit_type_mut(self, ty);
        }
    }
}

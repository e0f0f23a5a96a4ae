//! The key: text with `{param}` and `{param.field}`.

use syn::ext::IdentExt;
use syn::{Error, Ident, LitStr};

/// The longest name of a lock, the same as in the library.
const MAX_BYTES: usize = 512;

/// A parsed key.
pub(crate) struct Template {
    pub(crate) literal: LitStr,
    pub(crate) pieces: Vec<Piece>,
}

pub(crate) enum Piece {
    Text(String),
    /// A parameter or a field of it: `order.id` is `["order", "id"]`. `r#` is removed.
    Param(Vec<String>),
}

impl Template {
    /// Parses a key. The error contains all problems.
    pub(crate) fn parse(literal: LitStr) -> Result<Self, Error> {
        let mut problems = Vec::new();
        let pieces = pieces(&literal.value(), &mut problems);
        let fixed: usize = pieces.iter().map(|piece| if let Piece::Text(text) = piece { text.len() } else { 0 }).sum();
        if pieces.is_empty() {
            problems.push("the key is empty: a lock needs a name".to_owned());
        }
        if fixed > MAX_BYTES {
            problems.push(format!("the key is longer than {MAX_BYTES} bytes, the longest name of a lock"));
        }
        if literal.value().chars().any(char::is_control) {
            problems.push("the key has control characters, which the name of a lock cannot have".to_owned());
        }
        let errors = problems.into_iter().map(|problem| Error::new(literal.span(), problem));
        match errors.reduce(combine) {
            Some(error) => Err(error),
            None => Ok(Self { literal, pieces }),
        }
    }
}

pub(crate) fn combine(mut first: Error, second: Error) -> Error {
    first.combine(second);
    first
}

fn pieces(text: &str, problems: &mut Vec<String>) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut plain = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        plain.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        // A doubled brace is a literal brace.
        if let Some(after) = rest.strip_prefix(brace) {
            plain.push_str(brace);
            rest = after;
            continue;
        }
        if brace == "}" {
            problems.push("a `}` without its `{`: write `}}` for a brace in the key".to_owned());
            continue;
        }
        let Some((inside, after)) = rest.split_once('}') else {
            problems.push("a `{` without its `}`: write `{{` for a brace in the key".to_owned());
            rest = "";
            break;
        };
        rest = after;
        match param(inside) {
            Ok(path) => {
                if !plain.is_empty() {
                    pieces.push(Piece::Text(std::mem::take(&mut plain)));
                }
                pieces.push(Piece::Param(path));
            }
            Err(problem) => problems.push(problem),
        }
    }
    plain.push_str(rest);
    if !plain.is_empty() {
        pieces.push(Piece::Text(plain));
    }
    pieces
}

fn param(inside: &str) -> Result<Vec<String>, String> {
    if inside.is_empty() {
        return Err("`{}` names no parameter: write `{order_id}`".to_owned());
    }
    // As in `format!`, `{type}` is the parameter `r#type`.
    let path: Vec<&str> = inside.split('.').map(|name| name.strip_prefix("r#").unwrap_or(name)).collect();
    let is_field = |name: &&str| is_word(name) || name.parse::<u32>().is_ok();
    if !(path[0] == "self" || is_word(path[0])) || !path[1..].iter().all(is_field) {
        return Err(format!(
            "`{{{inside}}}` is neither a parameter nor a field of one: a key cannot have expressions or formats, \
             only `{{order_id}}` and `{{order.id}}`"
        ));
    }
    Ok(path.into_iter().map(str::to_owned).collect())
}

/// Returns whether the whole text can be the name of a parameter or field.
fn is_word(name: &str) -> bool {
    syn::parse_str::<Ident>(&format!("r#{name}")).is_ok_and(|ident| ident.unraw() == name)
}

//! Parses a YAML file into a tree of texts with their places. The types are applied later, when each part of the system reads
//! its own keys.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Location, MessageFormatter, Options, Spanned, UserMessageFormatter};

/// A place in a file: line and column, both from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct At {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// A value and its place.
pub(super) struct Node {
    pub(super) at: At,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    /// Empty or `null`.
    Nothing,
    Text(String),
    List(Vec<Node>),
    Map(Vec<(String, At, Node)>),
}

/// A syntax error and its place.
pub(super) struct Broken {
    pub(super) at: Option<At>,
    pub(super) problem: String,
}

/// Parses the text of a file.
pub(super) fn parse(text: &str) -> Result<Node, Broken> {
    // `yes`, `no` and `on` are texts, so a namespace may be called `no`.
    let mut options = Options::default();
    options.strict_booleans = true;
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let error = error.without_snippet();
        let mut problem = match error {
            serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => format!("`{key}` is given twice"),
            error => UserMessageFormatter.format_message(error).into_owned(),
        };
        // The most likely cause is `store: sqlite:`.
        if problem.contains("mapping values are not allowed") {
            problem += ": a value with a colon at its end, or before a space, needs quotes";
        }
        Broken { at: error.location().and_then(known), problem }
    })
}

fn known(location: Location) -> Option<At> {
    let at = At { line: usize::try_from(location.line()).ok()?, column: usize::try_from(location.column()).ok()? };
    (at.line > 0).then_some(at)
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Kind>::deserialize(deserializer)?;
        Ok(Self { at: known(spanned.referenced).unwrap_or(At { line: 1, column: 1 }), kind: spanned.value })
    }
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyKind)
    }
}

struct AnyKind;

impl<'de> Visitor<'de> for AnyKind {
    type Value = Kind;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value, a list or a section")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Kind, E> {
        Ok(Kind::Text(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Kind, E> {
        Ok(Kind::Text(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Kind, E> {
        Ok(Kind::Text(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Kind, E> {
        Ok(Kind::Text(value.to_string()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Kind, E> {
        Ok(Kind::Text(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Kind, E> {
        Ok(Kind::Nothing)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Kind, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Kind::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Kind, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let value: Node = map.next_value()?;
            entries.push((key.value, known(key.referenced).unwrap_or(value.at), value));
        }
        Ok(Kind::Map(entries))
    }
}

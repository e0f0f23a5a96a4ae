//! The part of RESP3 that the store needs: writes commands, parses replies and pushes.

use crate::store::{StoreError, StoreErrorKind, VALUE_BYTES_MAX};

/// Deepest nesting that is parsed: more than any reply needs. A deeper stream is rejected as unreadable.
const DEPTH_MAX: usize = 16;
/// Longest string that is kept: twice the longest one that the store writes, a binding's value. Another client wrote a
/// longer one, and its content is dropped.
const BULK_MAX: usize = 2 * VALUE_BYTES_MAX;
/// Longest string whose content is dropped: more than a server can hold. A longer one is rejected as unreadable.
const BULK_DROPPED_MAX: usize = 4 * 1024 * 1024 * 1024;
/// Most items to allocate for before they arrive, so that an announced length alone costs no memory.
const ITEMS_AHEAD: usize = 64;
/// Takes the place of a value that is too long to read. No client of ours writes it, and every client sees the same
/// text (`clipped` in `head.lua`).
pub(crate) const OVERSIZED: &str = "(a value of more than 65536 bytes)";

/// One command, serialized.
#[derive(Clone)]
pub(crate) struct Cmd {
    args: usize,
    body: Vec<u8>,
}

/// Several commands that are sent in one write.
#[derive(Clone, Default)]
pub(crate) struct Pipeline {
    cmds: Vec<Cmd>,
}

/// A value that the server sent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Nil,
    Int(i64),
    Double(f64),
    Boolean(bool),
    Simple(String),
    Bulk(Vec<u8>),
    Array(Vec<Value>),
    Map(Vec<(Value, Value)>),
    Error(ServerError),
    /// An out-of-band message, such as one of a subscription.
    Push(Vec<Value>),
}

/// An error reply, split into its first word and the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServerError {
    pub(crate) code: String,
    pub(crate) detail: String,
}

pub(crate) fn cmd(name: &str) -> Cmd {
    Cmd::with_capacity(name, 128)
}

impl Cmd {
    pub(crate) fn with_capacity(name: &str, bytes: usize) -> Self {
        let mut cmd = Self { args: 0, body: Vec::with_capacity(bytes) };
        cmd.arg(name);
        cmd
    }

    pub(crate) fn arg(&mut self, arg: impl Arg) -> &mut Self {
        arg.write(self);
        self
    }

    pub(crate) fn write_to(&self, out: &mut Vec<u8>) {
        out.push(b'*');
        write_number(out, self.args as u64);
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(&self.body);
    }

    fn text(&mut self, text: &[u8]) {
        self.args += 1;
        self.body.push(b'$');
        write_number(&mut self.body, text.len() as u64);
        self.body.extend_from_slice(b"\r\n");
        self.body.extend_from_slice(text);
        self.body.extend_from_slice(b"\r\n");
    }
}

impl Pipeline {
    pub(crate) fn with_capacity(cmds: usize) -> Self {
        Self { cmds: Vec::with_capacity(cmds) }
    }

    /// Appends a command and returns it, to add its arguments.
    pub(crate) fn cmd(&mut self, name: &str) -> &mut Cmd {
        self.cmds.push(cmd(name));
        self.cmds.last_mut().expect("pushed just now")
    }

    pub(crate) fn add(&mut self, cmd: Cmd) {
        self.cmds.push(cmd);
    }

    pub(crate) fn len(&self) -> usize {
        self.cmds.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.cmds.is_empty()
    }

    pub(crate) fn write_to(&self, out: &mut Vec<u8>) {
        self.cmds.iter().for_each(|cmd| cmd.write_to(out));
    }
}

/// A command's argument.
pub(crate) trait Arg {
    fn write(&self, cmd: &mut Cmd);
}

impl<T: Arg + ?Sized> Arg for &T {
    fn write(&self, cmd: &mut Cmd) {
        (**self).write(cmd);
    }
}

impl Arg for str {
    fn write(&self, cmd: &mut Cmd) {
        cmd.text(self.as_bytes());
    }
}

impl Arg for String {
    fn write(&self, cmd: &mut Cmd) {
        cmd.text(self.as_bytes());
    }
}

impl Arg for Vec<u8> {
    fn write(&self, cmd: &mut Cmd) {
        cmd.text(self);
    }
}

impl Arg for u64 {
    fn write(&self, cmd: &mut Cmd) {
        let mut digits = [0; 20];
        cmd.text(number_text(*self, &mut digits));
    }
}

impl Arg for usize {
    fn write(&self, cmd: &mut Cmd) {
        (*self as u64).write(cmd);
    }
}

impl Arg for [&str] {
    fn write(&self, cmd: &mut Cmd) {
        self.iter().for_each(|text| text.write(cmd));
    }
}

impl<const N: usize> Arg for [&str; N] {
    fn write(&self, cmd: &mut Cmd) {
        self[..].write(cmd);
    }
}

fn write_number(out: &mut Vec<u8>, number: u64) {
    let mut digits = [0; 20];
    out.extend_from_slice(number_text(number, &mut digits));
}

/// Formats a number. Every command has a dozen of them, so this avoids the cost of `format!`.
fn number_text(mut number: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + u8::try_from(number % 10).unwrap_or(0);
        number /= 10;
        if number == 0 {
            return &digits[at..];
        }
    }
}

/// The bulk string that replaces an oversized one.
pub(crate) fn replacement() -> Vec<u8> {
    format!("${}\r\n{OVERSIZED}\r\n", OVERSIZED.len()).into_bytes()
}

/// What a stream begins with.
#[derive(Debug)]
pub(crate) enum Read {
    /// A value and its length in bytes.
    Value(Value, usize),
    /// An incomplete value.
    More,
    /// A value that contains an oversized string.
    Oversized(OversizedText),
}

/// The position of a string that is too long to keep. Its content is dropped while it arrives, and a short text takes
/// its place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OversizedText {
    /// The bytes that announce the length; the content begins at the end.
    pub(crate) header: std::ops::Range<usize>,
    bytes: usize,
}

impl OversizedText {
    /// Number of bytes to drop after the header, with the final line break.
    pub(crate) fn drops(&self) -> usize {
        self.bytes + 2
    }
}

/// Parses the first value of `bytes`.
///
/// # Errors
/// When the bytes are not RESP3: nothing after them can be interpreted.
pub(crate) fn read(bytes: &[u8]) -> Result<Read, StoreError> {
    let mut parser = Parser { bytes, at: 0 };
    match parser.value(0) {
        Ok(value) => Ok(Read::Value(value, parser.at)),
        Err(Stop::More) => Ok(Read::More),
        Err(Stop::Oversized(text)) => Ok(Read::Oversized(text)),
        Err(Stop::Unreadable) => {
            Err(StoreError::new(StoreErrorKind::Unreachable, "the server sent something unreadable"))
        }
    }
}

enum Stop {
    More,
    Oversized(OversizedText),
    Unreadable,
}

struct Parser<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn value(&mut self, depth: usize) -> Result<Value, Stop> {
        if depth > DEPTH_MAX {
            return Err(Stop::Unreadable);
        }
        let kind = *self.bytes.get(self.at).ok_or(Stop::More)?;
        self.at += 1;
        match kind {
            b'+' => Ok(Value::Simple(self.words()?)),
            b'-' => Ok(Value::Error(ServerError::parse(&self.words()?))),
            b':' => Ok(Value::Int(self.integer()?)),
            b'$' => self.bulk(),
            b'*' | b'~' => self.items(depth).map(|items| items.map_or(Value::Nil, Value::Array)),
            b'>' => self.items(depth).map(|items| items.map_or(Value::Nil, Value::Push)),
            b'%' => self.map(depth).map(Value::Map),
            b'_' => self.line().map(|_| Value::Nil),
            b',' => self.words()?.parse().map(Value::Double).map_err(|_| Stop::Unreadable),
            b'#' => Ok(Value::Boolean(self.line()? == b"t")),
            b'(' => Ok(Value::Simple(self.words()?)),
            b'=' => match self.bulk()? {
                // The text follows a format of four bytes, such as `txt:`.
                Value::Bulk(text) => Ok(Value::Bulk(text.get(4..).unwrap_or_default().to_vec())),
                other => Ok(other),
            },
            b'!' => match self.bulk()? {
                Value::Bulk(text) => Ok(Value::Error(ServerError::parse(&String::from_utf8_lossy(&text)))),
                _ => Err(Stop::Unreadable),
            },
            // Attributes of the value that follows.
            b'|' => {
                self.map(depth)?;
                self.value(depth + 1)
            }
            _ => Err(Stop::Unreadable),
        }
    }

    fn line(&mut self) -> Result<&[u8], Stop> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|byte| *byte == b'\r').ok_or(Stop::More)?;
        match rest.get(end + 1) {
            None => Err(Stop::More),
            Some(b'\n') => {
                self.at += end + 2;
                Ok(&rest[..end])
            }
            Some(_) => Err(Stop::Unreadable),
        }
    }

    fn words(&mut self) -> Result<String, Stop> {
        self.line().map(|line| String::from_utf8_lossy(line).into_owned())
    }

    fn integer(&mut self) -> Result<i64, Stop> {
        let line = self.line()?;
        std::str::from_utf8(line).ok().and_then(|digits| digits.parse().ok()).ok_or(Stop::Unreadable)
    }

    /// Parses a length. RESP2 writes a null value as the length -1: `None`.
    fn length(&mut self) -> Result<Option<usize>, Stop> {
        match self.integer()? {
            -1 => Ok(None),
            length => usize::try_from(length).map(Some).map_err(|_| Stop::Unreadable),
        }
    }

    fn bulk(&mut self) -> Result<Value, Stop> {
        let begins = self.at - 1;
        let Some(length) = self.length()? else { return Ok(Value::Nil) };
        if length > BULK_DROPPED_MAX {
            return Err(Stop::Unreadable);
        }
        if length > BULK_MAX {
            return Err(Stop::Oversized(OversizedText { header: begins..self.at, bytes: length }));
        }
        let end = self.at + length;
        match self.bytes.get(end..end + 2) {
            None => Err(Stop::More),
            Some(b"\r\n") => {
                let text = self.bytes[self.at..end].to_vec();
                self.at = end + 2;
                Ok(Value::Bulk(text))
            }
            Some(_) => Err(Stop::Unreadable),
        }
    }

    fn items(&mut self, depth: usize) -> Result<Option<Vec<Value>>, Stop> {
        let Some(length) = self.length()? else { return Ok(None) };
        let mut items = Vec::with_capacity(length.min(ITEMS_AHEAD));
        for _ in 0..length {
            items.push(self.value(depth + 1)?);
        }
        Ok(Some(items))
    }

    fn map(&mut self, depth: usize) -> Result<Vec<(Value, Value)>, Stop> {
        let length = self.length()?.ok_or(Stop::Unreadable)?;
        let mut pairs = Vec::with_capacity(length.min(ITEMS_AHEAD));
        for _ in 0..length {
            pairs.push((self.value(depth + 1)?, self.value(depth + 1)?));
        }
        Ok(pairs)
    }
}

impl ServerError {
    fn parse(line: &str) -> Self {
        let (code, detail) = line.split_once(' ').unwrap_or((line, ""));
        Self { code: code.to_owned(), detail: detail.to_owned() }
    }

    /// Whether only a replica sends this error.
    pub(crate) fn is_from_replica(&self) -> bool {
        matches!(self.code.as_str(), "READONLY" | "MASTERDOWN")
    }

    pub(crate) fn is_no_script(&self) -> bool {
        self.code == "NOSCRIPT"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &str) -> Value {
        let Ok(Read::Value(value, taken)) = read(text.as_bytes()) else { panic!("{text:?} is no whole value") };
        assert_eq!(taken, text.len(), "{text:?}");
        value
    }

    fn bulk(text: &str) -> Value {
        Value::Bulk(text.as_bytes().to_vec())
    }

    #[test]
    fn commands_are_written_as_the_server_expects_them() {
        let mut pipe = Pipeline::default();
        pipe.cmd("SET").arg("k").arg("ä b").arg("PX").arg(30_000_u64).arg(["NX", "GET"]);
        pipe.cmd("INCR").arg(String::from("f"));
        let mut out = Vec::new();
        pipe.write_to(&mut out);
        let expected = "*7\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\nä b\r\n$2\r\nPX\r\n$5\r\n30000\r\n$2\r\nNX\r\n$3\r\nGET\r\n\
                        *2\r\n$4\r\nINCR\r\n$1\r\nf\r\n";
        assert_eq!(String::from_utf8(out).expect("text"), expected);
        let mut digits = [0; 20];
        assert_eq!(number_text(u64::MAX, &mut digits), b"18446744073709551615");
        assert_eq!(number_text(0, &mut digits), b"0");
    }

    #[test]
    fn every_kind_of_value_is_read() {
        assert_eq!(whole("+OK\r\n"), Value::Simple("OK".into()));
        assert_eq!(whole(":-7\r\n"), Value::Int(-7));
        assert_eq!(whole("$5\r\na\r\nbc\r\n"), bulk("a\r\nbc"));
        assert_eq!(whole("$-1\r\n"), Value::Nil);
        assert_eq!(whole("*-1\r\n"), Value::Nil);
        assert_eq!(whole("_\r\n"), Value::Nil);
        assert_eq!(whole(",1.5\r\n"), Value::Double(1.5));
        assert_eq!(whole("#t\r\n"), Value::Boolean(true));
        assert_eq!(whole("=6\r\ntxt:ab\r\n"), bulk("ab"));
        assert_eq!(
            whole("*2\r\n:1\r\n*1\r\n$1\r\nx\r\n"),
            Value::Array(vec![Value::Int(1), Value::Array(vec![bulk("x")])])
        );
        assert_eq!(whole("%1\r\n+a\r\n:1\r\n"), Value::Map(vec![(Value::Simple("a".into()), Value::Int(1))]));
        assert_eq!(whole(">2\r\n$1\r\na\r\n:1\r\n"), Value::Push(vec![bulk("a"), Value::Int(1)]));
        assert_eq!(whole("|1\r\n+ttl\r\n:1\r\n:2\r\n"), Value::Int(2));
        let error = |code: &str, detail: &str| Value::Error(ServerError { code: code.into(), detail: detail.into() });
        assert_eq!(whole("-OOM no room\r\n"), error("OOM", "no room"));
        assert_eq!(whole("!9\r\nERR a\r\nbc\r\n"), error("ERR", "a\r\nbc"));
    }

    #[test]
    fn a_value_cut_at_any_byte_is_incomplete() {
        let text = b"*3\r\n$3\r\nabc\r\n%1\r\n+k\r\n,0.5\r\n|1\r\n+a\r\n#f\r\n:12\r\n";
        for end in 0..text.len() {
            assert!(matches!(read(&text[..end]), Ok(Read::More)), "{end}");
        }
        assert!(matches!(read(text), Ok(Read::Value(..))));
    }

    #[test]
    fn invalid_bytes_are_refused_and_cost_no_memory() {
        let deep = "*1\r\n".repeat(100);
        for text in ["?\r\n", ":x\r\n", "$x\r\n", "$-2\r\n", "$1\r\nabc", "$99999999999\r\n", ",x\r\n", deep.as_str()] {
            assert!(read(text.as_bytes()).is_err(), "{text:?}");
        }
        assert!(matches!(read(b"*999999999999\r\n"), Ok(Read::More)), "may still come");
    }

    #[test]
    fn an_oversized_text_is_found_at_any_position() {
        for (before, text) in [("", "$104857600\r\nab"), ("*2\r\n:1\r\n", "$104857600\r\n")] {
            let stream = format!("{before}{text}");
            let Ok(Read::Oversized(found)) = read(stream.as_bytes()) else { panic!("{stream:?}") };
            assert_eq!(found.header, before.len()..before.len() + 12);
            assert_eq!(found.drops(), 104_857_602);
            assert!(
                matches!(read(&replacement()), Ok(Read::Value(Value::Bulk(text), _)) if text == OVERSIZED.as_bytes())
            );
        }
    }
}

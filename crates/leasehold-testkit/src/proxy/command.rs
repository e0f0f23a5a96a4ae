//! Parsed commands.

use std::fmt;
use std::io;

use crate::resp;

/// A command on its way to the server.
#[derive(Clone, PartialEq, Eq)]
pub struct Command {
    name: String,
    args: Vec<Vec<u8>>,
}

impl Command {
    /// Returns its name in upper case. A script is `EVAL` or `EVALSHA`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns an argument; 0 is the first after the name.
    pub fn arg(&self, index: usize) -> Option<&[u8]> {
        self.args.get(index).map(Vec::as_slice)
    }

    /// Returns all arguments after the name.
    pub fn args(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.args.iter().map(Vec::as_slice)
    }

    /// Removes the first complete command from `buffer`, and returns it with its bytes.
    pub(super) fn take_from(buffer: &mut Vec<u8>) -> io::Result<Option<(Self, Vec<u8>)>> {
        let inline = buffer.first().is_some_and(|&first| first != b'*');
        let len = if inline { resp::line_at(buffer, 0).map(|(_, len)| len) } else { resp::frame_len(buffer)? };
        let Some(len) = len else { return Ok(None) };
        let frame: Vec<u8> = buffer.drain(..len).collect();
        let parts = if inline {
            frame.split(u8::is_ascii_whitespace).filter(|part| !part.is_empty()).map(<[u8]>::to_vec).collect()
        } else {
            resp::command_parts(&frame)?
        };
        Ok(Some((Self::from_parts(parts), frame)))
    }

    fn from_parts(parts: Vec<Vec<u8>>) -> Self {
        let mut parts = parts.into_iter();
        let name = parts.next().unwrap_or_default();
        Self { name: String::from_utf8_lossy(&name).to_ascii_uppercase(), args: parts.collect() }
    }
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", arg.escape_ascii()))
    }
}

/// Matches commands by name. Case does not matter.
pub fn on(name: &str) -> impl Fn(&Command) -> bool + Send + Sync + 'static {
    let name = name.to_ascii_uppercase();
    move |command| command.name == name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipelined_commands_are_parsed_one_by_one() {
        let mut buffer = b"*2\r\n$3\r\nget\r\n$1\r\nk\r\nping\r\n*1\r\n$4\r\nPI".to_vec();
        let (get, bytes) = Command::take_from(&mut buffer).expect("well formed").expect("whole");
        assert!(on("GET")(&get));
        assert_eq!(get.arg(0), Some(&b"k"[..]));
        assert_eq!(bytes, b"*2\r\n$3\r\nget\r\n$1\r\nk\r\n");
        let (ping, _) = Command::take_from(&mut buffer).expect("well formed").expect("whole");
        assert_eq!(ping.name(), "PING");
        assert_eq!(Command::take_from(&mut buffer).expect("well formed"), None);
        assert_eq!(buffer, b"*1\r\n$4\r\nPI");
    }
}

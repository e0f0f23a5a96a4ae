//! Enough RESP to split a stream of bytes into frames.

use std::io;

/// The limit of a frame. A longer one means that the stream was parsed wrongly.
const MAX_FRAME_BYTES: usize = 512 * 1024 * 1024;

/// Returns the length of the first frame in `buffer`, in RESP2 or RESP3; `None` while bytes are missing.
///
/// An attribute is part of the reply that follows it.
pub(crate) fn frame_len(buffer: &[u8]) -> io::Result<Option<usize>> {
    let mut at = 0;
    let mut values_left: usize = 1;
    while values_left > 0 {
        let Some((line, after_line)) = line_at(buffer, at) else {
            return Ok(None);
        };
        let (&kind, rest) = line.split_first().ok_or_else(|| malformed("an empty line"))?;
        values_left -= 1;
        at = after_line;
        match kind {
            b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' => {}
            b'$' | b'!' | b'=' => {
                if let Some(len) = length(rest)? {
                    at += len + 2;
                }
            }
            b'*' | b'~' | b'>' => values_left += length(rest)?.unwrap_or(0),
            b'%' => values_left += 2 * length(rest)?.unwrap_or(0),
            b'|' => values_left += 2 * length(rest)?.unwrap_or(0) + 1,
            other => return Err(malformed(&format!("type byte {:?}", char::from(other)))),
        }
        if at > buffer.len() {
            return Ok(None);
        }
    }
    Ok(Some(at))
}

/// Returns the parts of a command, which is an array of bulk strings.
pub(crate) fn command_parts(frame: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let (header, mut at) = line_at(frame, 0).ok_or_else(|| malformed("an incomplete command"))?;
    let count = match header.split_first() {
        Some((b'*', rest)) => length(rest)?.unwrap_or(0),
        _ => return Err(malformed("a command that is not an array")),
    };
    let mut parts = Vec::new();
    for _ in 0..count {
        let (part, next) = bulk_at(frame, at).ok_or_else(|| malformed("a part that is not a bulk string"))?;
        parts.push(part.to_vec());
        at = next;
    }
    Ok(parts)
}

/// Returns the first element of an array or push frame if it is a string. For a push it is the kind.
pub(crate) fn first_element(frame: &[u8]) -> Option<&[u8]> {
    let (_, at) = line_at(frame, 0)?;
    match frame.get(at)? {
        b'$' => bulk_at(frame, at).map(|(text, _)| text),
        b'+' => line_at(frame, at).map(|(line, _)| &line[1..]),
        _ => None,
    }
}

/// Returns the line that starts at `at`, without its line break, and the start of the next line.
pub(crate) fn line_at(buffer: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let rest = buffer.get(at..)?;
    let len = rest.windows(2).position(|pair| pair == b"\r\n")?;
    Some((&rest[..len], at + len + 2))
}

fn bulk_at(buffer: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let (line, start) = line_at(buffer, at)?;
    let len = length(line.strip_prefix(b"$")?).ok()??;
    Some((buffer.get(start..start + len)?, start + len + 2))
}

/// Parses a length; `None` for -1, which is the RESP2 nil.
fn length(digits: &[u8]) -> io::Result<Option<usize>> {
    let text = std::str::from_utf8(digits).unwrap_or("?");
    if text == "-1" {
        return Ok(None);
    }
    match text.parse::<usize>() {
        Ok(len) if len <= MAX_FRAME_BYTES => Ok(Some(len)),
        _ => Err(malformed(&format!("length {text:?}"))),
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not RESP: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAMES: &[&[u8]] = &[
        b"+OK\r\n",
        b"-ERR no\r\n",
        b":12\r\n",
        b"_\r\n",
        b",3.5\r\n",
        b"#t\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"$0\r\n\r\n",
        b"$4\r\na\r\nb\r\n",
        b"=5\r\ntxt:a\r\n",
        b"*0\r\n",
        b"*2\r\n*1\r\n:1\r\n$1\r\nx\r\n",
        b"%1\r\n+key\r\n*2\r\n:1\r\n:2\r\n",
        b"~1\r\n:1\r\n",
        b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n",
        b"|1\r\n+ttl\r\n:3\r\n$1\r\nx\r\n",
    ];

    #[test]
    fn frames_have_the_right_length() {
        for frame in FRAMES {
            let mut stream = frame.to_vec();
            stream.extend_from_slice(b"+next\r\n");
            assert_eq!(frame_len(&stream).expect("well formed"), Some(frame.len()));
            for cut in 0..frame.len() {
                assert_eq!(frame_len(&frame[..cut]).expect("well formed"), None, "{frame:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn invalid_frames_are_errors() {
        for bytes in [&b"\r\n"[..], b"?1\r\n", b"$-2\r\n", b"*x\r\n", b"$99999999999999\r\n"] {
            assert!(frame_len(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn commands_and_push_kinds_are_parsed() {
        let parts = command_parts(b"*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n").expect("well formed");
        assert_eq!(parts, [b"GET".to_vec(), b"a\r\n".to_vec()]);
        assert_eq!(first_element(FRAMES[15]), Some(&b"message"[..]));
        assert_eq!(first_element(b"*1\r\n:1\r\n"), None);
    }
}

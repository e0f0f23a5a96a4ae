//! The stored result of a command that was run once: a line of JSON, then its stdout, then its stderr.

use std::io::{self, Write};

use leasehold::once::Done;
use serde::{Deserialize, Serialize};

use super::capture::Captured;
use crate::exit::{Exit, Failure};
use crate::output;

/// The first line: the exit code, and the length of each stream as stored and in total.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    code: u8,
    stdout: usize,
    stderr: usize,
    stdout_total: u64,
    stderr_total: u64,
}

/// Returns the bytes to store.
pub(super) fn encode(code: u8, stdout: &Captured, stderr: &Captured) -> Vec<u8> {
    let head = Head {
        code,
        stdout: stdout.bytes.len(),
        stderr: stderr.bytes.len(),
        stdout_total: stdout.total,
        stderr_total: stderr.total,
    };
    let mut result = serde_json::to_vec(&head).expect("a head is JSON");
    result.push(b'\n');
    result.extend_from_slice(&stdout.bytes);
    result.extend_from_slice(&stderr.bytes);
    result
}

/// Writes a stored output to stdout and stderr, and returns the exit code.
pub(super) fn replay(done: &Done) -> Result<u8, Failure> {
    let Some((head, stdout, stderr)) = decode(done.bytes()) else {
        let text = format!("what {} stored is not the result of a command; another program uses this id", done.by());
        return Err(Failure::new(Exit::Config, text));
    };
    // A reader that closes the pipe early (`| head`) is no error, as with the command itself.
    match write(io::stdout().lock(), stdout) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            return Err(Failure::new(Exit::Output, format!("cannot write to stdout: {error}")));
        }
        _ => {}
    }
    let _ = write(io::stderr().lock(), stderr);
    for (name, stored, total) in
        [("stdout", head.stdout, head.stdout_total), ("stderr", head.stderr, head.stderr_total)]
    {
        if stored as u64 != total {
            let by = done.by();
            output::message(&format!(
                "leasehold: {name} is not whole: {stored} of the {total} bytes that {by} wrote were stored"
            ));
        }
    }
    Ok(head.code)
}

fn write(mut to: impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}

fn decode(result: &[u8]) -> Option<(Head, &[u8], &[u8])> {
    let end = result.iter().position(|byte| *byte == b'\n')?;
    let head: Head = serde_json::from_slice(&result[..end]).ok()?;
    let (stdout, stderr) = result[end + 1..].split_at_checked(head.stdout)?;
    (stderr.len() == head.stderr).then_some((head, stdout, stderr))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_round_trip() {
        let captured = |bytes: &[u8], total| Captured { bytes: bytes.to_vec(), total };
        let result = encode(3, &captured(b"\n\xff\0", 3), &captured(b"", 9));
        let (head, stdout, stderr) = decode(&result).expect("a result");
        assert_eq!((head.code, stdout, stderr, head.stderr_total), (3, &b"\n\xff\0"[..], &b""[..], 9));
        assert!(decode(&result[..result.len() - 1]).is_none() && decode(b"7").is_none() && decode(b"7\n").is_none());
    }
}

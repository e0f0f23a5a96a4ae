//! The result of a command that was run once, as it is stored: a line of JSON, then what it wrote to stdout,
//! then what it wrote to stderr.

use std::io::{self, Write};

use leasehold::once::Done;
use serde::{Deserialize, Serialize};

use super::tee::Kept;
use crate::exit::{Exit, Failure};
use crate::say;

/// How the command ended, and how long each stream was, and is here.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    code: u8,
    stdout: usize,
    stderr: usize,
    stdout_total: u64,
    stderr_total: u64,
}

/// As it is stored.
pub(super) fn written(code: u8, stdout: &Kept, stderr: &Kept) -> Vec<u8> {
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

/// Writes what the command wrote where it was run, and says how it ended.
pub(super) fn replay(done: &Done) -> Result<u8, Failure> {
    let Some((head, stdout, stderr)) = read(done.bytes()) else {
        let text = format!("what {} stored is not the result of a command; another program uses this id", done.by());
        return Err(Failure::new(Exit::Config, text));
    };
    // A reader that has seen enough (`| head`) is no error, here as with the command itself.
    match write(io::stdout().lock(), stdout) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            return Err(Failure::new(Exit::Output, format!("cannot write to stdout: {error}")));
        }
        _ => {}
    }
    let _ = write(io::stderr().lock(), stderr);
    for (name, kept, total) in [("stdout", head.stdout, head.stdout_total), ("stderr", head.stderr, head.stderr_total)]
    {
        if kept as u64 != total {
            let by = done.by();
            say::talk(&format!(
                "leasehold: {name} is not whole: {kept} of the {total} bytes were stored that {by} wrote"
            ));
        }
    }
    Ok(head.code)
}

fn write(mut to: impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}

fn read(result: &[u8]) -> Option<(Head, &[u8], &[u8])> {
    let end = result.iter().position(|byte| *byte == b'\n')?;
    let head: Head = serde_json::from_slice(&result[..end]).ok()?;
    let (stdout, stderr) = result[end + 1..].split_at_checked(head.stdout)?;
    (stderr.len() == head.stderr).then_some((head, stdout, stderr))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_read_back_byte_for_byte() {
        let kept = |bytes: &[u8], total| Kept { bytes: bytes.to_vec(), total };
        let result = written(3, &kept(b"\n\xff\0", 3), &kept(b"", 9));
        let (head, stdout, stderr) = read(&result).expect("ours");
        assert_eq!((head.code, stdout, stderr, head.stderr_total), (3, &b"\n\xff\0"[..], &b""[..], 9));
        assert!(read(&result[..result.len() - 1]).is_none() && read(b"7").is_none() && read(b"7\n").is_none());
    }
}

//! Output: data to stdout, messages to stderr. Untrusted text is escaped, so that it cannot control the terminal.

use std::borrow::Cow;
use std::io::{self, Write};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::exit::{Exit, Failure};

/// Escapes untrusted text (a lock name, an owner, a server's message) for a terminal: control characters, escape sequences
/// and characters that change the text direction become `\u{…}`.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(controls_terminal) {
        return text.into();
    }
    let escape = |c: char| if controls_terminal(c) { c.escape_unicode().to_string() } else { c.to_string() };
    text.chars().map(escape).collect::<String>().into()
}

/// Returns whether a character controls the terminal or changes how the text around it is displayed.
fn controls_terminal(c: char) -> bool {
    c.is_control()
        // Invisible: zero-width marks, direction marks and overrides, line separators, tags.
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Writes one line to stderr. Ignores a closed stderr.
pub(crate) fn message(line: &str) {
    write(format!("{}\n", escaped(line)));
}

/// Writes a failure to stderr: `leasehold: ` and its line, then its details, indented.
pub(crate) fn failure(failure: &Failure) {
    let mut text = format!("leasehold: {}\n", escaped(&failure.line));
    for detail in &failure.details {
        text += &format!("  {}\n", escaped(detail));
    }
    // In one write, so that lines of several processes do not interleave.
    write(text);
}

/// The capacity of the background writer's queue; further messages are dropped.
const UNWRITTEN_MAX: usize = 64;
/// How long an ending process waits until its messages are written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the start of a command waits until the status line is cleared.
const CLEAR_TIMEOUT: Duration = Duration::from_millis(100);

static IN_BACKGROUND: AtomicBool = AtomicBool::new(false);
/// The channel to the background writer, or `None` if its thread could not be started.
static WRITER: LazyLock<Option<Sender<String>>> = LazyLock::new(start_writer);
/// The number of messages in the background writer's queue.
static UNWRITTEN: AtomicUsize = AtomicUsize::new(0);

/// Writes all messages on a background thread from now on: a full pipe or a stopped terminal (Ctrl-S) must not delay a
/// renewal or a kill. stderr itself stays blocking, because CMD would share `O_NONBLOCK`.
pub(crate) fn write_in_background() {
    IN_BACKGROUND.store(true, Ordering::Relaxed);
}

/// Draws the status line unless earlier output is still unwritten. Returns whether it was drawn.
pub(crate) fn draw_status(text: String) -> bool {
    let free = UNWRITTEN.load(Ordering::Acquire) == 0;
    if free {
        write(text);
    }
    free
}

/// Clears the status line.
pub(crate) fn clear_status(text: &str) {
    write(text.to_owned());
}

/// Waits for at most [`FLUSH_TIMEOUT`] until all messages are written. The rest is lost.
pub(crate) fn flush() {
    let started_at = Instant::now();
    while UNWRITTEN.load(Ordering::Acquire) > 0 && started_at.elapsed() < FLUSH_TIMEOUT {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Waits for at most [`CLEAR_TIMEOUT`] until the status line is cleared.
pub(crate) async fn status_cleared() {
    let started_at = Instant::now();
    while UNWRITTEN.load(Ordering::Acquire) > 0 && started_at.elapsed() < CLEAR_TIMEOUT {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Writes to stderr, directly or on the background writer.
fn write(text: String) {
    if !IN_BACKGROUND.load(Ordering::Relaxed) {
        let _ = io::stderr().lock().write_all(text.as_bytes());
        return;
    }
    if UNWRITTEN.load(Ordering::Acquire) < UNWRITTEN_MAX
        && let Some(writer) = &*WRITER
    {
        UNWRITTEN.fetch_add(1, Ordering::AcqRel);
        if writer.send(text).is_err() {
            UNWRITTEN.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn start_writer() -> Option<Sender<String>> {
    let (writer, texts): (_, Receiver<String>) = channel();
    let write_all = move || {
        for text in texts {
            let _ = io::stderr().lock().write_all(text.as_bytes());
            UNWRITTEN.fetch_sub(1, Ordering::AcqRel);
        }
    };
    std::thread::Builder::new().name("leasehold-write".into()).spawn(write_all).ok().map(|_| writer)
}

/// Writes data to stdout and flushes it. Returns `false` if the reader closed the pipe (`| head`), which is not an error.
pub(crate) fn data(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::new(Exit::Output, format!("cannot write to stdout: {error}"))),
    }
}

/// Writes a value to stdout as one line of JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<bool, Failure> {
    data(&(serde_json::to_string(value).expect("output can be serialized") + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(escaped("order:42 ünï 日本"), "order:42 ünï 日本");
        assert_eq!(escaped("\u{1b}[2J"), "\\u{1b}[2J");
        assert_eq!(escaped("a\nb\u{9b}31m"), "a\\u{a}b\\u{9b}31m");
        assert_eq!(escaped("evil\u{202e}gpj"), "evil\\u{202e}gpj");
        for c in (0..=0x10_ffff).filter_map(char::from_u32).filter(|c| c.is_control()) {
            assert!(!escaped(&c.to_string()).contains(c), "{c:?}");
        }
    }
}

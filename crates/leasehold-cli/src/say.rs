//! stdout is data, stderr is talk; nothing from strangers drives the terminal.

use std::borrow::Cow;
use std::io::{self, Write};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::exit::{Exit, Failure};

/// A text from elsewhere (a lock name, an owner, a server's message) as it may be shown: control
/// characters, escape sequences and what turns the reading direction are written out as `\u{…}`.
pub(crate) fn shown(text: &str) -> Cow<'_, str> {
    if !text.contains(drives) {
        return text.into();
    }
    let escape = |c: char| if drives(c) { c.escape_unicode().to_string() } else { c.to_string() };
    text.chars().map(escape).collect::<String>().into()
}

/// Characters that change what a terminal does or how the text around them reads.
fn drives(c: char) -> bool {
    c.is_control()
        // Invisible: zero-width marks, direction marks and overrides, line separators, tags.
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// One line to whoever watches. A closed stderr is no error.
pub(crate) fn talk(line: &str) {
    write(format!("{}\n", shown(line)));
}

/// `leasehold: what happened`, and below it what else helps.
pub(crate) fn failure(failure: &Failure) {
    let mut text = format!("leasehold: {}\n", shown(&failure.line));
    for detail in &failure.details {
        text += &format!("  {}\n", shown(detail));
    }
    // In one write: lines of several processes on one terminal do not mix.
    write(text);
}

/// Texts that wait to be written; more are dropped.
const WAITING_MAX: usize = 64;
/// How long the end of a process waits for a reader of its messages.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a command's start waits for a terminal to be wiped.
const WIPED_WITHIN: Duration = Duration::from_millis(100);

static IN_BACKGROUND: AtomicBool = AtomicBool::new(false);
/// The thread that writes; none when it could not be started.
static WRITER: LazyLock<Option<Sender<String>>> = LazyLock::new(start_writer);
/// Texts that were handed to the writer and are not written yet.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// From now on a thread of its own writes to stderr, and nobody waits for it: a pipe that is full or a terminal that
/// was stopped (Ctrl-S) must not hold up a renewal or a kill. stderr itself stays as it is: it is CMD's, too, and
/// `O_NONBLOCK` would be shared with it.
pub(crate) fn in_background() {
    IN_BACKGROUND.store(true, Ordering::Relaxed);
}

/// Draws over what was drawn before; `false` when that has not even been written.
pub(crate) fn draw(text: String) -> bool {
    let free = WAITING.load(Ordering::Acquire) == 0;
    if free {
        write(text);
    }
    free
}

/// Takes away what was drawn.
pub(crate) fn wipe(text: &str) {
    write(text.to_owned());
}

/// Waits until everything is written, for a second at most. What nobody has read by then is lost.
pub(crate) fn flush() {
    let began = Instant::now();
    while WAITING.load(Ordering::Acquire) > 0 && began.elapsed() < LAST_WORDS {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Waits until what was drawn is wiped away, for a tenth of a second at most, and holds nothing up.
pub(crate) async fn flushed() {
    let began = Instant::now();
    while WAITING.load(Ordering::Acquire) > 0 && began.elapsed() < WIPED_WITHIN {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Writes to stderr, or has it written.
fn write(text: String) {
    if !IN_BACKGROUND.load(Ordering::Relaxed) {
        let _ = io::stderr().lock().write_all(text.as_bytes());
        return;
    }
    if WAITING.load(Ordering::Acquire) < WAITING_MAX
        && let Some(writer) = &*WRITER
    {
        WAITING.fetch_add(1, Ordering::AcqRel);
        if writer.send(text).is_err() {
            WAITING.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn start_writer() -> Option<Sender<String>> {
    let (writer, texts): (_, Receiver<String>) = channel();
    let write_all = move || {
        for text in texts {
            let _ = io::stderr().lock().write_all(text.as_bytes());
            WAITING.fetch_sub(1, Ordering::AcqRel);
        }
    };
    std::thread::Builder::new().name("leasehold-say".into()).spawn(write_all).ok().map(|_| writer)
}

/// Writes data to stdout, flushed. `false`: nobody reads any more (`| head`), which is no error.
pub(crate) fn data(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::new(Exit::Output, format!("cannot write to stdout: {error}"))),
    }
}

/// One line of JSON on stdout.
pub(crate) fn json(value: &impl Serialize) -> Result<bool, Failure> {
    data(&(serde_json::to_string(value).expect("what is said is JSON") + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_drives_a_terminal_gets_through() {
        assert_eq!(shown("order:42 ünï 日本"), "order:42 ünï 日本");
        assert_eq!(shown("\u{1b}[2J"), "\\u{1b}[2J");
        assert_eq!(shown("a\nb\u{9b}31m"), "a\\u{a}b\\u{9b}31m");
        assert_eq!(shown("evil\u{202e}gpj"), "evil\\u{202e}gpj");
        for c in (0..=0x10_ffff).filter_map(char::from_u32).filter(|c| c.is_control()) {
            assert!(!shown(&c.to_string()).contains(c), "{c:?}");
        }
    }
}

//! stdout is data, stderr is talk; nothing from strangers drives the terminal.

use std::borrow::Cow;
use std::io::{self, Write};

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
    let _ = writeln!(io::stderr().lock(), "{}", shown(line));
}

/// `leasehold: what happened`, and below it what else helps.
pub(crate) fn failure(failure: &Failure) {
    let mut text = format!("leasehold: {}\n", shown(&failure.line));
    for detail in &failure.details {
        text += &format!("  {}\n", shown(detail));
    }
    // In one write: lines of several processes on one terminal do not mix.
    let _ = io::stderr().lock().write_all(text.as_bytes());
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

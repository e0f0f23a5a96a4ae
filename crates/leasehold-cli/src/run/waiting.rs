//! What a person sees who waits: one line, drawn again and again, and gone afterwards.

use std::io::{self, IsTerminal};
use std::time::Duration;

use leasehold::inspect::LockInfo;
use leasehold::{LockManager, Owner};
use rustix::process::getpgrp;
use rustix::termios::{tcgetpgrp, tcgetwinsize};

use crate::cli::RunArgs;
use crate::{duration, say};

/// A lock that is free a moment later is not worth a line.
const FIRST_AFTER: Duration = Duration::from_millis(200);
const DRAW_EVERY: Duration = Duration::from_millis(100);
/// Draws between two questions to the store.
const ASK_EVERY: u32 = 10;
const WHEEL: [char; 10] = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];
const CLEAR_LINE: &str = "\r\x1b[2K";

/// Shows on a terminal who holds the lock, until it is dropped; elsewhere it is silent. Never ends.
pub(super) async fn show(locks: &LockManager, args: &RunArgs, me: &Owner) {
    if !io::stderr().is_terminal() {
        return std::future::pending().await;
    }
    tokio::time::sleep(FIRST_AFTER).await;
    let mut line = Line { drawn: false };
    let mut info = None;
    for turn in 0_u32.. {
        if turn.is_multiple_of(ASK_EVERY) {
            // Without an answer the last one stays; the waiting itself will say what is wrong.
            info = match &args.name {
                Some(name) => locks.info(name).await.ok().or(info),
                // Of any, nobody in particular is in the way.
                None => None,
            };
        }
        let wheel = WHEEL[turn as usize % WHEEL.len()];
        line.draw(&format!("{wheel} {}", text(&args.wanted(), info.as_ref(), me)));
        tokio::time::sleep(DRAW_EVERY).await;
    }
}

/// The line on the terminal; takes itself away.
struct Line {
    drawn: bool,
}

impl Line {
    fn draw(&mut self, text: &str) {
        // In the background the terminal is somebody else's.
        if tcgetpgrp(io::stderr()).is_ok_and(|group| group == getpgrp()) {
            let width = tcgetwinsize(io::stderr())
                .map_or(80, |size| if size.ws_col == 0 { 80 } else { usize::from(size.ws_col).max(20) });
            let text: String = text.chars().take(width - 1).collect();
            self.drawn |= say::draw(format!("{CLEAR_LINE}{text}"));
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.drawn {
            say::wipe(CLEAR_LINE);
        }
    }
}

fn text(wanted: &str, info: Option<&LockInfo>, me: &Owner) -> String {
    let mut text = format!("waiting for {}", say::shown(wanted));
    let Some(info) = info else { return text };
    if let Some(holder) = &info.holder {
        text += &format!(" · held by {}", say::shown(&holder.owner.to_string()));
        if let Some(held) = super::held::held_for(holder) {
            text += &format!(" for {}", duration::shown(held));
        }
    }
    if let Some(before) = info.waiters.iter().position(|waiter| waiter.owner == *me) {
        text += &format!(" · {} in line", ordinal(before + 1));
    }
    text
}

fn ordinal(n: usize) -> String {
    let ending = match (n % 10, n % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{n}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_said_as_people_say_them() {
        let said: Vec<String> = [1, 2, 3, 4, 11, 12, 13, 21, 102, 111].map(ordinal).into();
        assert_eq!(said, ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]);
    }
}

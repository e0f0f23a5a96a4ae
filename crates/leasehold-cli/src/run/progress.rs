//! The status line on the terminal of a run that waits for its lock.

use std::io::{self, IsTerminal};
use std::time::Duration;

use leasehold::inspect::LockInfo;
use leasehold::{LockManager, Owner};
use rustix::process::getpgrp;
use rustix::termios::{tcgetpgrp, tcgetwinsize};

use crate::cli::RunArgs;
use crate::{duration, output};

/// The wait before the first line: most locks are free by then.
const FIRST_DRAW_AFTER: Duration = Duration::from_millis(200);
const DRAW_INTERVAL: Duration = Duration::from_millis(100);
/// The number of draws between two queries of the store.
const DRAWS_PER_QUERY: u32 = 10;
const SPINNER: [char; 10] = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];
const CLEAR_LINE: &str = "\r\x1b[2K";

/// Shows on a terminal who holds the lock, until the future is dropped; elsewhere shows nothing. Never returns.
pub(super) async fn show(locks: &LockManager, args: &RunArgs, me: &Owner) {
    if !io::stderr().is_terminal() {
        return std::future::pending().await;
    }
    tokio::time::sleep(FIRST_DRAW_AFTER).await;
    let mut line = Line { drawn: false };
    let mut info = None;
    for draw in 0_u32.. {
        if draw.is_multiple_of(DRAWS_PER_QUERY) {
            // Without an answer the last one stays; the acquisition reports what is wrong.
            info = match &args.name {
                Some(name) => locks.info(name).await.ok().or(info),
                // With `--gpu any` there is no particular holder to wait for.
                None => None,
            };
        }
        let frame = SPINNER[draw as usize % SPINNER.len()];
        line.draw(&format!("{frame} {}", text(&args.wanted(), info.as_ref(), me)));
        tokio::time::sleep(DRAW_INTERVAL).await;
    }
}

/// The line on the terminal, cleared when dropped.
struct Line {
    drawn: bool,
}

impl Line {
    fn draw(&mut self, text: &str) {
        // The terminal of a job in the background belongs to another job.
        if tcgetpgrp(io::stderr()).is_ok_and(|group| group == getpgrp()) {
            let width = tcgetwinsize(io::stderr())
                .map_or(80, |size| if size.ws_col == 0 { 80 } else { usize::from(size.ws_col).max(20) });
            let text: String = text.chars().take(width - 1).collect();
            self.drawn |= output::draw_status(format!("{CLEAR_LINE}{text}"));
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.drawn {
            output::clear_status(CLEAR_LINE);
        }
    }
}

fn text(wanted: &str, info: Option<&LockInfo>, me: &Owner) -> String {
    let mut text = format!("waiting for {}", output::escaped(wanted));
    let Some(info) = info else { return text };
    if let Some(holder) = &info.holder {
        text += &format!(" · held by {}", output::escaped(&holder.owner.to_string()));
        if let Some(held) = super::not_acquired::held_for(holder) {
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
    fn queue_positions_are_shown_as_ordinals() {
        let shown: Vec<String> = [1, 2, 3, 4, 11, 12, 13, 21, 102, 111].map(ordinal).into();
        assert_eq!(shown, ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]);
    }
}

//! `ls` and `why`: locks, their holders and their waiters.

use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::time::Duration;

use leasehold::LockManager;
use leasehold::inspect::{LockInfo, LockView};

use crate::cli::{LsArgs, WhyArgs};
use crate::duration::{self, shown_ms};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::store::Choice;

/// The interval of `--watch`: fast enough for people, and no load for the store.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// The width of the bar that shows the remaining time of a lease.
const BAR_CELLS: u64 = 5;

/// Lists the locks that are held.
pub(crate) async fn ls(args: LsArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let locks = store.connect().await?;
    let prefix = args.prefix.as_deref().unwrap_or("");
    if args.watch {
        return watch(&locks, prefix, json).await;
    }
    let views = views(&locks, prefix).await?;
    if json {
        output::json(&views)?;
    } else if views.is_empty() {
        output::message(&nothing_held(&locks, prefix));
    } else {
        output::data(&table(&views, io::stdout().is_terminal()))?;
    }
    locks.shutdown().await;
    Ok(Exit::Done)
}

/// Repeats the list until it is interrupted or the reader closes the pipe.
async fn watch(locks: &LockManager, prefix: &str, json: bool) -> Result<Exit, Failure> {
    let terminal = io::stdout().is_terminal() && !json;
    loop {
        let text = match views(locks, prefix).await {
            Ok(views) if json => serde_json::to_string(&views).expect("views are JSON") + "\n",
            Ok(views) if views.is_empty() => nothing_held(locks, prefix) + "\n",
            Ok(views) => table(&views, terminal),
            // A terminal shows the error until the store is back.
            Err(failure) if terminal => format!("{}\n", output::escaped(&failure.line)),
            Err(failure) => return Err(failure),
        };
        let reader_is_open = if terminal {
            // Move the cursor home, write the lines that fit, clear the rest of the screen.
            let rows = rustix::termios::tcgetwinsize(io::stdout()).map_or(24, |size| usize::from(size.ws_row));
            let lines: String = text.lines().take(rows.max(2) - 1).map(|line| format!("{line}\u{1b}[K\n")).collect();
            output::data(&format!("\u{1b}[H{lines}\u{1b}[J"))?
        } else if json {
            output::data(&text)?
        } else {
            output::data(&(text + "\n"))?
        };
        if !reader_is_open {
            return Ok(Exit::Done);
        }
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

/// Prints the details of one lock.
pub(crate) async fn why(args: WhyArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let locks = store.connect().await?;
    let info = locks.info(&args.name).await?;
    if json {
        output::json(&info.view())?;
    } else {
        output::data(&details(&info, &locks.store()))?;
    }
    locks.shutdown().await;
    Ok(Exit::Done)
}

async fn views(locks: &LockManager, prefix: &str) -> Result<Vec<LockView>, Failure> {
    Ok(locks.overview(prefix).await?.iter().map(LockInfo::view).collect())
}

fn nothing_held(locks: &LockManager, prefix: &str) -> String {
    let which = if prefix.is_empty() { String::new() } else { format!(" that begins with {prefix}") };
    format!("no lock{which} is held in {}", locks.store())
}

/// Formats one line per lock, in columns.
fn table(views: &[LockView], bars: bool) -> String {
    let mut rows = vec![["NAME", "HOLDER", "HELD", "LEASE", "SEEN", "WAITING"].map(String::from)];
    for view in views {
        rows.push([
            output::escaped(&view.name).into_owned(),
            output::escaped(&holder(view)).into_owned(),
            view.held_ms.map_or_else(unknown, shown_ms),
            lease(view, bars),
            seen_ago_ms(view).map_or_else(unknown, shown_ms),
            view.waiters.len().to_string(),
        ]);
    }
    columns(&rows)
}

fn holder(view: &LockView) -> String {
    let owner = view.owner.as_deref().unwrap_or("nobody");
    match (view.foreign, view.revoked) {
        (true, _) => format!("foreign ({owner})"),
        (_, true) => format!("{owner}, revoked"),
        _ => owner.to_owned(),
    }
}

fn lease(view: &LockView, bars: bool) -> String {
    let Some(left) = view.ttl_left_ms else { return "no end".into() };
    let left_shown = shown_ms(left);
    match view.ttl_ms.filter(|ttl| bars && *ttl > 0) {
        Some(ttl) => {
            let full = (left * BAR_CELLS).div_ceil(ttl).min(BAR_CELLS);
            let cell = |n| if n < full { '▆' } else { '▁' };
            format!("{} {left_shown}", (0..BAR_CELLS).map(cell).collect::<String>())
        }
        None => left_shown,
    }
}

/// Returns how long ago the last sign of life was.
fn seen_ago_ms(view: &LockView) -> Option<u64> {
    let now_ms = view.since_ms? + view.held_ms?;
    Some(now_ms.saturating_sub(view.last_seen_ms?))
}

fn unknown() -> String {
    "–".into()
}

/// Aligns columns to the left, without trailing spaces.
fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for row in rows {
        let cells: String = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}   ")).collect();
        text += cells.trim_end();
        text.push('\n');
    }
    text
}

/// Formats the output of `why`.
fn details(info: &LockInfo, store: &str) -> String {
    let view = info.view();
    let state = match (view.held, view.revoked) {
        (false, _) => "free",
        (true, false) => "held",
        (true, true) => "held, revoked",
    };
    let mut text = format!("{:<16}  {state:<24} {}\n", output::escaped(&view.name), output::escaped(store));
    let mut line = |label: &str, text_of_line: &str| {
        let _ = writeln!(text, "  {label:<14}  {}", output::escaped(text_of_line));
    };
    if let Some(holder) = &info.holder {
        let fence = view.fence.map_or_else(String::new, |fence| format!("   fence {fence}"));
        let who = if view.foreign { "another kind of client, which wrote: " } else { "" };
        line("holder", &format!("{who}{}   id {}{fence}", holder.owner, holder.id));
        if let (Some(since), Some(held)) = (view.since_ms, view.held_ms) {
            line("since", &format!("{}, {} ago", duration::clock(since, since + held), shown_ms(held)));
        }
        let left = match (view.ttl_ms, view.ttl_left_ms) {
            (Some(ttl), Some(left)) => format!("lease {}, {} left", shown_ms(ttl), shown_ms(left)),
            (None, Some(left)) => format!("{} left", shown_ms(left)),
            (_, None) => "does not expire".into(),
        };
        let process = match holder.connected {
            _ if view.foreign => "liveness unknown",
            Some(true) => "connected",
            Some(false) => "not connected",
            None if !holder.listens => "not tied to a process: only its ttl counts",
            None => "connection unknown",
        };
        match seen_ago_ms(&view) {
            Some(ago) => line("sign of life", &format!("{} ago, {process}   {left}", shown_ms(ago))),
            None => line("sign of life", &format!("{process}   {left}")),
        }
    }
    if view.waiters.is_empty() {
        line("waiting", "nobody");
    }
    let width = view.waiters.iter().map(|w| w.owner.chars().count()).max().unwrap_or(0);
    for (n, waiter) in view.waiters.iter().enumerate() {
        let label = if n == 0 { "waiting" } else { "" };
        line(label, &format!("{}. {:<width$}   {}", n + 1, waiter.owner, shown_ms(waiter.waiting_ms)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(left_ms: Option<u64>) -> LockView {
        LockView {
            name: "gpu\u{1b}[2J".into(),
            held: true,
            owner: Some("tts@gpu-a (pid 8)".into()),
            holder_id: Some("7f3a91c2b04d".into()),
            fence: Some(7),
            since_ms: Some(1_000_000),
            held_ms: Some(520_000),
            ttl_ms: Some(300_000),
            ttl_left_ms: left_ms,
            last_seen_ms: Some(1_517_000),
            connected: Some(true),
            revoked: false,
            foreign: false,
            waiters: Vec::new(),
        }
    }

    #[test]
    fn a_table_is_aligned_and_escaped() {
        let table = table(&[view(Some(297_000)), view(None)], false);
        assert_eq!(
            table,
            "NAME           HOLDER              HELD     LEASE    SEEN   WAITING\n\
             gpu\\u{1b}[2J   tts@gpu-a (pid 8)   8m 40s   4m 57s   3s     0\n\
             gpu\\u{1b}[2J   tts@gpu-a (pid 8)   8m 40s   no end   3s     0\n"
        );
    }

    #[test]
    fn the_bar_shows_the_remaining_time() {
        assert_eq!(lease(&view(Some(300_000)), true), "▆▆▆▆▆ 5m 00s");
        assert_eq!(lease(&view(Some(90_000)), true), "▆▆▁▁▁ 1m 30s");
        assert_eq!(lease(&view(Some(1)), true), "▆▁▁▁▁ 1ms");
        assert_eq!(lease(&view(Some(900_000)), true), "▆▆▆▆▆ 15m 00s");
    }
}

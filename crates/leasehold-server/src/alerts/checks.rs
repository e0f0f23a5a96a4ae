//! Periodic checks: the fleet's counters, whether the store answers, the journal of this machine, and whether the
//! store's settings are safe.

use std::time::Duration;

use leasehold::Owner;
use leasehold::inspect::{Finding, JournalKind};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::condition::{Condition, Level, Source};
use super::rules::CounterWindow;
use crate::clock::unix_ms;
use crate::{App, journal};

/// How often the counters, the store and the journal are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The pause before a store that did not answer is checked again. After a second failure it counts as down.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How often the progress through the counters is stored.
const MARK_INTERVAL: Duration = Duration::from_secs(60);
/// How often the settings of the store are checked. A check reads a whole file or sends many queries.
const CHECKUP_INTERVAL: Duration = Duration::from_secs(60 * 60);
/// The delay before the first check of the settings: many servers do not run for longer.
const FIRST_CHECKUP_AFTER: Duration = Duration::from_secs(3);

/// Findings that are not about the store's settings: the store is down, or a program cannot be queried.
const NOT_SETTINGS: [&str; 4] = ["reachable", "not checked", "permissions", "pushes"];

/// Runs the checks until the server stops.
pub(crate) fn start_checks(app: App) -> JoinHandle<()> {
    let stopping = app.stopping.clone();
    tokio::spawn(async move {
        let _ = stopping.run_until_cancelled(check_forever(app)).await;
    })
}

async fn check_forever(app: App) {
    let mut window = CounterWindow::new(app.settings.alerts.window);
    let mut failures = 0_u32;
    let mut mark_at = Instant::now() + MARK_INTERVAL;
    let mut checkup_at = Instant::now() + FIRST_CHECKUP_AFTER;
    loop {
        let answered = check_store(&app, &mut window, &mut failures).await;
        check_journal(&app).await;
        app.alerts.tick();
        if app.alerts.leads() {
            if let Some(counted) = answered.as_ref().filter(|_| Instant::now() >= mark_at) {
                mark_at = Instant::now() + MARK_INTERVAL;
                let marks = window.marks(counted);
                if let Err(error) = app.locks.add_to_fleet_counters(&marks).await {
                    tracing::debug!(error = %format_args!("{error:#}"), "cannot store the progress through the counters");
                }
            }
            if answered.is_some() && Instant::now() >= checkup_at {
                checkup_at = Instant::now() + CHECKUP_INTERVAL;
                app.alerts.report(Source::Checkup, risky_settings(&app.locks.checkup().await).into_iter().collect());
            }
        }
        tokio::time::sleep(if failures == 1 { RETRY_INTERVAL } else { CHECK_INTERVAL }).await;
    }
}

/// Checks the store and the counters. Returns the counters if the store answered.
async fn check_store(app: &App, window: &mut CounterWindow, failures: &mut u32) -> Option<Vec<(String, u64)>> {
    match app.locks.fleet_counters().await {
        Ok(counted) => {
            *failures = 0;
            app.alerts.report(Source::Store, Vec::new());
            app.alerts.report(Source::Fleet, window.sample(&counted, unix_ms()));
            Some(counted)
        }
        Err(error) => {
            *failures = failures.saturating_add(1);
            if *failures > 1 {
                let (store, machine) = (app.locks.store(), machine());
                let text = format!("{store} does not answer {machine}: no lock can be acquired, and leases expire");
                tracing::debug!(error = %format_args!("{error:#}"), "the store does not answer");
                app.alerts.report(Source::Store, vec![Condition::new("store_down", Level::Critical, text)]);
            }
            None
        }
    }
}

async fn check_journal(app: &App) {
    // A journal that cannot be read is logged. Its entries are unknown, so nothing is reported.
    let Ok(entries) = journal::entries(app).await else { return };
    let condition = (!entries.is_empty()).then(|| {
        let open = entries.iter().filter(|entry| entry.kind == JournalKind::Unreleased).count();
        let text = format!(
            "{}; the oldest concerns {}. See `leasehold journal list`",
            journal_summary(&machine(), open, entries.len() - open),
            entries[0].name
        );
        #[expect(clippy::cast_precision_loss, reason = "a count for people")]
        let count = entries.len() as f64;
        Condition::new("journal_not_empty", Level::Warning, text).value(count)
    });
    app.alerts.report(Source::Journal, condition.into_iter().collect());
}

/// The host of this server, for alerts that concern only this machine.
fn machine() -> String {
    Owner::named("leasehold serve").map_or_else(|_| "this machine".into(), |owner| owner.host().to_owned())
}

/// Describes the journal for people.
fn journal_summary(machine: &str, unreleased: usize, unprotected: usize) -> String {
    let released = match unreleased {
        0 => None,
        1 => Some("1 lock that could not be released".to_owned()),
        n => Some(format!("{n} locks that could not be released")),
    };
    let ran = match unprotected {
        0 => None,
        1 => Some("work that ran without its lock once".to_owned()),
        n => Some(format!("work that ran without its lock {n} times")),
    };
    let both: Vec<String> = released.into_iter().chain(ran).collect();
    format!("the journal of {machine} has {}", both.join(" and "))
}

/// Combines the risky findings of a checkup into one condition, because they concern one store.
fn risky_settings(findings: &[Finding]) -> Option<Condition> {
    let risky = findings.iter().filter(|f| f.level > leasehold::inspect::Level::Ok && !NOT_SETTINGS.contains(&f.check));
    let worst = risky.clone().map(|finding| finding.level).max()?;
    let texts: Vec<String> = risky.map(|finding| format!("{}: {}", finding.check, finding.text)).collect();
    let level = if worst == leasehold::inspect::Level::Bad { Level::Critical } else { Level::Warning };
    Some(Condition::new("risky_store_settings", level, texts.join(" · ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_is_summarized_in_words() {
        let cases = [
            (1, 0, "1 lock that could not be released"),
            (2, 1, "2 locks that could not be released and work that ran without its lock once"),
            (0, 3, "work that ran without its lock 3 times"),
        ];
        for (unreleased, unprotected, text) in cases {
            assert_eq!(journal_summary("db-1", unreleased, unprotected), format!("the journal of db-1 has {text}"));
        }
    }

    #[test]
    fn only_settings_of_the_store_are_risky() {
        let finding = |level, check, text: &str| Finding { level, check, text: text.into() };
        let fine = [
            finding(leasehold::inspect::Level::Ok, "eviction", "fine"),
            finding(leasehold::inspect::Level::Bad, "reachable", "that is another alert"),
            finding(leasehold::inspect::Level::Warn, "permissions", "without CLIENT KILL"),
        ];
        assert_eq!(risky_settings(&fine), None);
        let warn = finding(leasehold::inspect::Level::Warn, "persistence", "appendonly no");
        let found = risky_settings(std::slice::from_ref(&warn)).expect("risky");
        assert_eq!((found.level, found.kind), (Level::Warning, "risky_store_settings"));
        let bad = finding(leasehold::inspect::Level::Bad, "eviction", "volatile-lru");
        let found = risky_settings(&[warn, bad]).expect("risky");
        assert_eq!(
            (found.level, found.message.contains("appendonly") && found.message.contains("lru")),
            (Level::Critical, true)
        );
    }
}

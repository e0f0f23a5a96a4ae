//! Looking for what is the matter: the fleet's counters, whether the store answers, the journal of this machine, and
//! whether the store's settings can keep a promise.

use std::time::Duration;

use leasehold::{Finding, JournalKind, Owner};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::condition::{Condition, Level, Source};
use super::rules::Window;
use crate::{App, journal, wall_ms};

/// How often the counters, the store and the journal are looked at.
const EVERY: Duration = Duration::from_secs(5);
/// A store that did not answer once is asked again after this; when it does not then either, it is down.
const AGAIN: Duration = Duration::from_secs(1);
/// How often it is written down how far the counters were looked at.
const MARK_EVERY: Duration = Duration::from_secs(60);
/// How often the settings of the store are looked at: a look reads a whole file, or asks many things.
const CHECKUP_EVERY: Duration = Duration::from_secs(60 * 60);
/// The first of them comes a little later: many servers are over before that.
const FIRST_CHECKUP: Duration = Duration::from_secs(3);

/// Findings that are not the store's settings: the store is down, or a program cannot be asked.
const NOT_SETTINGS: [&str; 4] = ["reachable", "not checked", "permissions", "pushes"];

/// Looks until the server stops.
pub(crate) fn watch(app: App) -> JoinHandle<()> {
    let stopping = app.stopping.clone();
    tokio::spawn(async move {
        let _ = stopping.run_until_cancelled(look_again_and_again(app)).await;
    })
}

async fn look_again_and_again(app: App) {
    let mut window = Window::new(app.settings.alerts.window);
    let mut failures = 0_u32;
    let mut mark_at = Instant::now() + MARK_EVERY;
    let mut checkup_at = Instant::now() + FIRST_CHECKUP;
    loop {
        let answered = look(&app, &mut window, &mut failures).await;
        journal_look(&app).await;
        app.alerts.tick();
        if app.alerts.leads() {
            if let Some(counted) = answered.as_ref().filter(|_| Instant::now() >= mark_at) {
                mark_at = Instant::now() + MARK_EVERY;
                let marks = window.marks(counted);
                if let Err(error) = app.locks.add_to_fleet_counters(&marks).await {
                    tracing::debug!(%error, "how far the counters were looked at was not written");
                }
            }
            if answered.is_some() && Instant::now() >= checkup_at {
                checkup_at = Instant::now() + CHECKUP_EVERY;
                app.alerts.holding(Source::Checkup, risky(&app.locks.checkup().await).into_iter().collect());
            }
        }
        tokio::time::sleep(if failures == 1 { AGAIN } else { EVERY }).await;
    }
}

/// The counters, if the store answered.
async fn look(app: &App, window: &mut Window, failures: &mut u32) -> Option<Vec<(String, u64)>> {
    match app.locks.fleet_counters().await {
        Ok(counted) => {
            *failures = 0;
            app.alerts.holding(Source::Store, Vec::new());
            app.alerts.holding(Source::Fleet, window.sample(&counted, wall_ms()));
            Some(counted)
        }
        Err(error) => {
            *failures = failures.saturating_add(1);
            if *failures > 1 {
                let (store, machine) = (app.locks.store(), machine());
                let text = format!("{store} does not answer {machine}: nobody can take a lock, and leases run out");
                tracing::debug!(%error, "the store does not answer");
                app.alerts.holding(Source::Store, vec![Condition::new("store_down", Level::Critical, text)]);
            }
            None
        }
    }
}

async fn journal_look(app: &App) {
    // One that cannot be read is in the log; it says nothing of its entries.
    let Ok(entries) = journal::entries(app).await else { return };
    let condition = (!entries.is_empty()).then(|| {
        let open = entries.iter().filter(|entry| entry.kind == JournalKind::Unreleased).count();
        let text = format!(
            "{}; the oldest is of {}. See leasehold journal list",
            left(&machine(), open, entries.len() - open),
            entries[0].name
        );
        #[expect(clippy::cast_precision_loss, reason = "a count for people")]
        let count = entries.len() as f64;
        Condition::new("journal_not_empty", Level::Warning, text).value(count)
    });
    app.alerts.holding(Source::Journal, condition.into_iter().collect());
}

/// Where this server runs: it tells what only it can know, and others may tell the same of their machines.
fn machine() -> String {
    Owner::named("leasehold serve").map_or_else(|_| "this machine".into(), |owner| owner.host().to_owned())
}

/// What stands in the journal, for people.
fn left(machine: &str, unreleased: usize, unprotected: usize) -> String {
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

/// What a checkup found to be risky, in one condition: it is one store.
fn risky(findings: &[Finding]) -> Option<Condition> {
    let risky = findings.iter().filter(|f| f.level > leasehold::Level::Ok && !NOT_SETTINGS.contains(&f.check));
    let worst = risky.clone().map(|finding| finding.level).max()?;
    let texts: Vec<String> = risky.map(|finding| format!("{}: {}", finding.check, finding.text)).collect();
    let level = if worst == leasehold::Level::Bad { Level::Critical } else { Level::Warning };
    Some(Condition::new("risky_store_settings", level, texts.join(" · ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_is_told_in_words() {
        let cases = [
            (1, 0, "1 lock that could not be released"),
            (2, 1, "2 locks that could not be released and work that ran without its lock once"),
            (0, 3, "work that ran without its lock 3 times"),
        ];
        for (unreleased, unprotected, text) in cases {
            assert_eq!(left("db-1", unreleased, unprotected), format!("the journal of db-1 has {text}"));
        }
    }

    #[test]
    fn only_what_the_store_is_set_to_is_risky() {
        let finding = |level, check, text: &str| Finding { level, check, text: text.into() };
        let fine = [
            finding(leasehold::Level::Ok, "eviction", "fine"),
            finding(leasehold::Level::Bad, "reachable", "that is another alert"),
            finding(leasehold::Level::Warn, "permissions", "without CLIENT KILL"),
        ];
        assert_eq!(risky(&fine), None);
        let warn = finding(leasehold::Level::Warn, "persistence", "appendonly no");
        let found = risky(std::slice::from_ref(&warn)).expect("risky");
        assert_eq!((found.level, found.kind), (Level::Warning, "risky_store_settings"));
        let bad = finding(leasehold::Level::Bad, "eviction", "volatile-lru");
        let found = risky(&[warn, bad]).expect("risky");
        assert_eq!(
            (found.level, found.message.contains("appendonly") && found.message.contains("lru")),
            (Level::Critical, true)
        );
    }
}

//! `journal`: releases that failed, and work that ran without protection.

use std::path::PathBuf;

use leasehold::inspect::{Journal, JournalEntry, JournalKind};
use serde_json::{Value, json};

use crate::cli::{JournalArgs, JournalCommand};
use crate::confirm;
use crate::duration;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::store::Choice;

/// Lists, shows, replays and settles entries. Only a replay connects to the store.
pub(crate) async fn journal(args: JournalArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let dir = args.dir.or(store.options()?.journal).ok_or_else(|| {
        Failure::new(Exit::Config, "no journal directory: set HOME or XDG_STATE_HOME, or use --dir DIR")
    })?;
    let journal = Journal::new(&dir);
    match args.command {
        JournalCommand::List => list(&journal, json),
        JournalCommand::Show { id } => show(&find(&journal, &id)?, json),
        JournalCommand::Replay => replay(dir, store, json).await,
        JournalCommand::Settle { id, yes } => settle(&journal, &id, yes, json),
    }
}

fn list(journal: &Journal, json: bool) -> Result<Exit, Failure> {
    let entries = entries(journal)?;
    if json {
        output::json(&entries.iter().map(object).collect::<Vec<_>>())?;
    } else if entries.is_empty() {
        output::message(&format!("the journal {} is empty", journal.dir().display()));
    } else {
        let line = |e: &JournalEntry| format!("{}  {:<11}  {}  {}  {}\n", e.id, word(e.kind), e.name, e.owner, e.store);
        output::data(&entries.iter().map(|e| safe_line(&line(e))).collect::<String>())?;
    }
    Ok(Exit::Done)
}

fn show(entry: &JournalEntry, json: bool) -> Result<Exit, Failure> {
    if json {
        output::json(&object(entry))?;
        return Ok(Exit::Done);
    }
    let what = match entry.kind {
        JournalKind::Unreleased => "the release failed; `journal replay` repeats it unless the lease has ended",
        _ => "work ran without protection while the store was unreachable; there is nothing to repeat",
    };
    let fence = entry.fence.map_or_else(|| "none".into(), |fence| fence.to_string());
    let lines = [
        ("entry", entry.id.clone()),
        ("lock", entry.name.clone()),
        ("what", what.into()),
        ("why", entry.why.clone()),
        ("when", duration::clock(entry.at_ms, 0)),
        ("holder", format!("{}   id {}   fence {fence}", entry.owner, entry.holder_id)),
        ("lease", duration::shown_ms(entry.ttl_ms)),
        ("store", entry.store.clone()),
        ("namespace", entry.namespace.clone()),
    ];
    output::data(&lines.iter().map(|(name, value)| safe_line(&format!("{name:<10}  {value}\n"))).collect::<String>())?;
    Ok(Exit::Done)
}

async fn replay(dir: PathBuf, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let journal = Journal::new(&dir);
    if entries(&journal)?.is_empty() && !json {
        output::message(&format!("the journal {} is empty", dir.display()));
        return Ok(Exit::Done);
    }
    let mut options = store.options()?;
    let namespace = options.keys.namespace().as_str().to_owned();
    options.journal = Some(dir);
    let locks = store.connect_with(options).await?;
    let here = locks.store();
    // Connecting also starts a replay, so count the entries before and after instead of using the result of this one.
    let before = entries(&journal)?;
    locks.replay_journal().await;
    let after = entries(&journal)?;
    locks.shutdown().await;
    let open = |e: &&JournalEntry| e.kind == JournalKind::Unreleased;
    let replayable = |e: &&JournalEntry| open(e) && e.store == here && e.namespace == namespace;
    let left = after.iter().filter(replayable).count();
    let settled = before.iter().filter(replayable).count().saturating_sub(left);
    let elsewhere: Vec<&JournalEntry> = after.iter().filter(open).filter(|e| !replayable(e)).collect();
    if json {
        output::json(&json!({ "settled": settled, "left": left, "elsewhere": elsewhere.len() }))?;
    } else {
        output::message(&format!("{settled} settled, {left} left in {here}"));
        for entry in &elsewhere {
            output::message(&format!(
                "{} belongs to {} (namespace {}): replay it with --store",
                entry.id, entry.store, entry.namespace
            ));
        }
    }
    if left > 0 {
        return Err(Failure::new(
            Exit::Unreachable,
            format!("{left} entries were not replayed: {here} does not answer"),
        ));
    }
    Ok(Exit::Done)
}

fn settle(journal: &Journal, id: &str, yes: bool, json: bool) -> Result<Exit, Failure> {
    let entry = find(journal, id)?;
    if !yes && !confirm::is_interactive() {
        return Err(Failure::new(Exit::Usage, "no terminal to ask for confirmation: use --yes"));
    }
    let question =
        format!("Remove {id} ({} of {}) from the journal without repeating it?", word(entry.kind), entry.name);
    if !yes && !confirm::confirm(&question)? {
        return Err(Failure::new(Exit::No, format!("not removed: {id} is still in the journal")));
    }
    if !journal.settle(id).map_err(|error| unreadable(journal, &error))? {
        return Err(no_entry(journal, id));
    }
    if json {
        output::json(&object(&entry))?;
    } else {
        output::message(&format!("{id} is settled"));
    }
    Ok(Exit::Done)
}

fn find(journal: &Journal, id: &str) -> Result<JournalEntry, Failure> {
    entries(journal)?.into_iter().find(|entry| entry.id == id).ok_or_else(|| no_entry(journal, id))
}

fn entries(journal: &Journal) -> Result<Vec<JournalEntry>, Failure> {
    journal.entries().map_err(|error| unreadable(journal, &error))
}

fn no_entry(journal: &Journal, id: &str) -> Failure {
    let text = format!("the journal {} has no entry {id}; see leasehold journal list", journal.dir().display());
    Failure::new(Exit::Usage, text)
}

fn unreadable(journal: &Journal, error: &std::io::Error) -> Failure {
    Failure::new(Exit::Config, format!("the journal {} cannot be used: {error}", journal.dir().display()))
}

fn word(kind: JournalKind) -> &'static str {
    match kind {
        JournalKind::Unreleased => "unreleased",
        _ => "unprotected",
    }
}

/// Describes an entry in JSON, without its token.
fn object(entry: &JournalEntry) -> Value {
    let mut object = serde_json::to_value(entry).expect("an entry is JSON");
    if let Some(fields) = object.as_object_mut() {
        fields.remove("token");
    }
    object
}

fn safe_line(line: &str) -> String {
    format!("{}\n", output::escaped(line.trim_end_matches('\n')))
}

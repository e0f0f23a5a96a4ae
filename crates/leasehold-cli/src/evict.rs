//! `evict`: takes a lock away from the holder that was shown, and from no other.

use leasehold::LockManager;
use leasehold::inspect::{EvictMode, Evicted, EvictedView, LockInfo};

use crate::cli::EvictArgs;
use crate::confirm;
use crate::duration;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::store::Choice;

/// Revokes a lock, or frees it by force.
pub(crate) async fn evict(args: EvictArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    // Checked first, so that a script without --yes fails at once.
    if !args.yes && !confirm::is_interactive() {
        return Err(Failure::new(Exit::Usage, "no terminal to ask for confirmation: use --yes"));
    }
    let locks = store.connect().await?;
    let exit = evict_from(&args, &locks, json).await;
    // The shutdown publishes the event.
    locks.shutdown().await;
    exit
}

async fn evict_from(args: &EvictArgs, locks: &LockManager, json: bool) -> Result<Exit, Failure> {
    let name = &args.name;
    let info = locks.info(name).await?;
    let Some(holder) = &info.holder else { return free(args, json) };
    if let Some(expected) = args.expect.filter(|expected| *expected != holder.id) {
        let line =
            format!("{name} is not held by {expected} but by {} (id {}); nothing was changed", holder.owner, holder.id);
        return Err(Failure::new(Exit::Lost, line));
    }
    if holder.foreign && !args.force {
        let line = format!(
            "{name} is held by another kind of client ({}), which cannot be revoked: wait, or free it with --force",
            holder.owner
        );
        return Err(Failure::new(Exit::Lost, line));
    }
    if !args.yes && !confirm::confirm(&consequence(args, &info))? {
        return Err(Failure::new(Exit::No, format!("not evicted: {} still holds {name}", holder.owner)));
    }
    let mode = if args.force { EvictMode::Force } else { EvictMode::Revoke };
    match locks.evict(name, holder.id, mode, &args.reason).await? {
        Evicted::Free => free(args, json),
        Evicted::ChangedHands(now) => {
            let line =
                format!("{name} has changed hands: {} (id {}) holds it now; nothing was changed", now.owner, now.id);
            Err(Failure::new(Exit::Lost, line))
        }
        Evicted::Foreign(now) => {
            let line = format!("{name} is held by another kind of client now ({}); nothing was changed", now.owner);
            Err(Failure::new(Exit::Lost, line))
        }
        Evicted::Done(old) => {
            if json {
                output::json(&EvictedView::done(name, mode, old))?;
                return Ok(Exit::Done);
            }
            let (id, owner) = (old.id, old.owner);
            if args.force {
                output::message(&format!("{name} was taken from {owner} (id {id}) by force"));
            } else {
                let notified = if old.listens { "is told to stop" } else { "has no process that can be told to stop" };
                let end = latest_end(&info);
                output::message(&format!(
                    "{name} was revoked: {owner} (id {id}) {notified}; it passes on when it is released{end}"
                ));
            }
            Ok(Exit::Done)
        }
    }
}

fn free(args: &EvictArgs, json: bool) -> Result<Exit, Failure> {
    if json {
        output::json(&EvictedView::free(&args.name))?;
    } else {
        output::message(&format!("{} is already free", args.name));
    }
    Ok(Exit::Done)
}

/// Returns the question: what happens to the holder, and who gets the lock next.
fn consequence(args: &EvictArgs, info: &LockInfo) -> String {
    let view = info.view();
    let owner = view.owner.as_deref().unwrap_or("its holder");
    let next = view.waiters.first().map_or("the next request", |w| &w.owner);
    if args.force {
        let seen = view.last_seen_ms.zip(view.since_ms.zip(view.held_ms));
        let seen = seen.map(|(seen, (since, held))| duration::shown_ms((since + held).saturating_sub(seen)));
        let seen = seen.map_or_else(String::new, |ago| format!(" (last sign of life {ago} ago)"));
        return format!(
            "Force: {next} gets {} now. {owner} may still be running{seen}: only fences protect what it writes. Force it?",
            args.name
        );
    }
    let notified = match info.holder.as_ref().is_some_and(|h| h.listens) {
        true => "is told to stop",
        false => "has no process to notify, so only its renewals are rejected",
    };
    format!("Revoke: {owner} {notified}; {next} gets {} when it is released{}. Revoke it?", args.name, latest_end(info))
}

fn latest_end(info: &LockInfo) -> String {
    let left = info.holder.as_ref().and_then(|h| h.ttl_left);
    left.map_or_else(String::new, |left| format!(", at the latest in {}", duration::shown(left)))
}

//! `evict`: taking a lock away, from the holder that was looked at and from nobody else.

use leasehold::LockManager;
use leasehold::inspect::{EvictMode, Evicted, EvictedView, LockInfo};

use crate::ask;
use crate::cli::EvictArgs;
use crate::duration;
use crate::exit::{Exit, Failure};
use crate::say;
use crate::store::Choice;

/// Revokes, or frees by force.
pub(crate) async fn evict(args: EvictArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    // Before anything is asked of the store: a script learns at once that it has to say --yes.
    if !args.yes && !ask::can_ask() {
        return Err(Failure::new(Exit::Usage, "there is no terminal to ask on: say --yes to evict without asking"));
    }
    let locks = store.connect().await?;
    let exit = evict_from(&args, &locks, json).await;
    // Tells those who follow the events.
    locks.shutdown().await;
    exit
}

async fn evict_from(args: &EvictArgs, locks: &LockManager, json: bool) -> Result<Exit, Failure> {
    let name = &args.name;
    let info = locks.info(name).await?;
    let Some(holder) = &info.holder else { return free(args, json) };
    if let Some(expected) = args.expect.filter(|expected| *expected != holder.id) {
        let line =
            format!("{name} is not held by {expected} but by {} (id {}): nothing was done", holder.owner, holder.id);
        return Err(Failure::new(Exit::Lost, line));
    }
    if holder.foreign && !args.force {
        let line = format!(
            "{name} is held by another kind of client ({}), which cannot be asked to stop: wait for it, or free it with --force",
            holder.owner
        );
        return Err(Failure::new(Exit::Lost, line));
    }
    if !args.yes && !ask::ask(&consequence(args, &info))? {
        return Err(Failure::new(Exit::No, format!("{name} was left to {}", holder.owner)));
    }
    let mode = if args.force { EvictMode::Force } else { EvictMode::Revoke };
    match locks.evict(name, holder.id, mode, &args.reason).await? {
        Evicted::Free => free(args, json),
        Evicted::ChangedHands(now) => {
            let line =
                format!("{name} has changed hands: {} (id {}) holds it now; nothing was done", now.owner, now.id);
            Err(Failure::new(Exit::Lost, line))
        }
        Evicted::Foreign(now) => {
            let line = format!("{name} is held by another kind of client now ({}); nothing was done", now.owner);
            Err(Failure::new(Exit::Lost, line))
        }
        Evicted::Done(old) => {
            if json {
                say::json(&EvictedView::done(name, mode, old))?;
                return Ok(Exit::Done);
            }
            let (id, owner) = (old.id, old.owner);
            if args.force {
                say::talk(&format!("{name} was taken from {owner} (id {id}) by force"));
            } else {
                let told = if old.listens { "is told to stop" } else { "belongs to no process, so nobody is told" };
                let end = latest_end(&info);
                say::talk(&format!(
                    "{name} was revoked: {owner} (id {id}) {told}; it passes on when it is released{end}"
                ));
            }
            Ok(Exit::Done)
        }
    }
}

fn free(args: &EvictArgs, json: bool) -> Result<Exit, Failure> {
    if json {
        say::json(&EvictedView::free(&args.name))?;
    } else {
        say::talk(&format!("{} is free already", args.name));
    }
    Ok(Exit::Done)
}

/// What will happen, with names.
fn consequence(args: &EvictArgs, info: &LockInfo) -> String {
    let view = info.view();
    let owner = view.owner.as_deref().unwrap_or("its holder");
    let next = view.waiters.first().map_or("whoever asks next", |w| &w.owner);
    if args.force {
        let seen = view.last_seen_ms.zip(view.since_ms.zip(view.held_ms));
        let seen = seen.map(|(seen, (since, held))| duration::shown_ms((since + held).saturating_sub(seen)));
        let seen = seen.map_or_else(String::new, |ago| format!(" (last sign of life {ago} ago)"));
        return format!(
            "Force: {next} gets {} now. {owner} may still be running{seen}: only fences protect what it writes. Free it?",
            args.name
        );
    }
    let told = match info.holder.as_ref().is_some_and(|h| h.listens) {
        true => "is told to stop",
        false => "belongs to no process, so only its renewals are refused",
    };
    format!("Revoke: {owner} {told}; {next} gets {} when it is released{}. Revoke it?", args.name, latest_end(info))
}

fn latest_end(info: &LockInfo) -> String {
    let left = info.holder.as_ref().and_then(|h| h.ttl_left);
    left.map_or_else(String::new, |left| format!(", at the latest in {}", duration::shown(left)))
}

//! `acquire`, `renew` and `release`: leases for scripts, identified by their token.

use std::fs;
use std::io::{self, BufRead};
use std::path::Path;

use leasehold::inspect::{AcquiredView, ReleasedView};
use leasehold::lease::Token;
use leasehold::{Error, LockManager, LockName, Owner};

use crate::cli::{AcquireArgs, ReleaseArgs, RenewArgs, TokenArgs};
use crate::duration;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::signals::{apply_default_action, first_termination_signal};
use crate::store::Choice;

/// Acquires a lease that is not tied to a process, and prints its token and fence.
pub(crate) async fn acquire(args: AcquireArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let mut options = store.options()?;
    options.owner = owner(args.owner)?;
    let first_signal =
        first_termination_signal().map_err(|e| Failure::new(Exit::Unreachable, format!("no signals: {e}")))?;
    let locks = store.connect_with(options).await?;
    let request = locks.lock(&args.name).ttl(args.ttl.duration());
    let request = match args.wait {
        Some(wait) => request.wait_up_to(wait),
        None => request.no_wait(),
    };
    let acquired = async { request.await?.detach().await };
    let lease = tokio::select! {
        biased;
        acquired = acquired => acquired?,
        Ok(signal) = first_signal => {
            // The shutdown gives up the place in the queue.
            locks.shutdown().await;
            apply_default_action(signal);
            unreachable!("{signal} has ended this process");
        }
    };
    let printed = if json {
        let mut view = locks.info(&args.name).await?.view();
        view.fence = lease.try_fence().map(leasehold::Fence::get);
        output::json(&AcquiredView::new(view, lease.token()))
    } else {
        let fence = lease.try_fence().map_or_else(String::new, |fence| fence.to_string());
        output::data(&format!("{}\n{fence}\n", lease.token().reveal()))
    };
    if !matches!(printed, Ok(true)) {
        // Without the token the caller could not release the lock.
        let _ = lease.release().await;
    }
    locks.shutdown().await;
    match printed? {
        true => Ok(Exit::Done),
        false => {
            let text = format!("cannot write the token, so {} was released", args.name);
            Err(Failure::new(Exit::Output, text))
        }
    }
}

/// Renews a lease by its token.
pub(crate) async fn renew(args: RenewArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let token = read_token(&args.token)?;
    let locks = store.connect().await?;
    let renewed = locks.lease(&args.name, &token)?.renew(args.ttl).await;
    if let Err(error) = renewed {
        return Err(not_held(error, &locks, &args.name, &token).await);
    }
    let info = locks.info(&args.name).await?;
    let view = info.view();
    if json {
        output::json(&view)?;
    } else {
        let left = view.ttl_left_ms.map_or_else(|| "no end".into(), duration::shown_ms);
        output::message(&format!("{} renewed, {left} left", args.name));
    }
    locks.shutdown().await;
    Ok(Exit::Done)
}

/// Releases a lock by its token.
pub(crate) async fn release(args: ReleaseArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let token = read_token(&args.token)?;
    let locks = store.connect().await?;
    if !locks.lease(&args.name, &token)?.release().await? {
        let lost = Error::Lost { name: args.name.clone(), why: leasehold::LossReason::Gone };
        return Err(not_held(lost, &locks, &args.name, &token).await);
    }
    if json {
        output::json(&ReleasedView { name: args.name.to_string(), released: true })?;
    }
    locks.shutdown().await;
    Ok(Exit::Done)
}

/// Returns the owner: the calling script, because this process is about to exit.
fn owner(given: Option<String>) -> Result<Owner, Failure> {
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get().unsigned_abs());
    let name = || fs::read_to_string(format!("/proc/{parent}/comm")).ok().map(|name| name.trim_end().to_owned());
    let owner = match given {
        Some(given) => Owner::named(given).map_err(|e| Failure::new(Exit::Usage, format!("--owner: {e}")))?,
        None => name().and_then(|name| Owner::named(name).ok()).unwrap_or_default(),
    };
    Ok(owner.with_pid(parent))
}

/// Describes why a token does not hold the lock, and names the actual holder.
async fn not_held(error: Error, locks: &LockManager, name: &LockName, token: &Token) -> Failure {
    let Error::Lost { why, .. } = &error else { return error.into() };
    let id = token.holder_id();
    let line = match locks.holder(name).await {
        Ok(Some(holder)) if holder.id == id => format!("{name} cannot be renewed: {why}; release it"),
        Ok(Some(holder)) => format!("{name} is not held by this token (holder {id}) but by {}", holder.owner),
        Ok(None) => format!("{name} is not held by this token (holder {id}): it is free"),
        Err(_) => format!("{name} is not held by this token (holder {id})"),
    };
    Failure::new(Exit::Lost, line)
}

/// Reads the token from `--token`, the file or `LEASEHOLD_TOKEN`. Errors never contain the token.
fn read_token(args: &TokenArgs) -> Result<Token, Failure> {
    let (text, from) = match (&args.token, &args.token_file) {
        (Some(token), _) => (token.clone(), "--token"),
        (None, Some(file)) => (first_line(file)?, "--token-file"),
        (None, None) => match std::env::var("LEASEHOLD_TOKEN") {
            Ok(token) if !token.is_empty() => (token, "LEASEHOLD_TOKEN"),
            _ => {
                let line = "no token: use --token-file FILE or --token T, or set LEASEHOLD_TOKEN";
                return Err(Failure::new(Exit::Usage, line));
            }
        },
    };
    Token::parse(text.trim()).map_err(|error| Failure::new(Exit::Usage, format!("{from}: {error}")))
}

fn first_line(file: &Path) -> Result<String, Failure> {
    let mut line = String::new();
    let read = if file == Path::new("-") {
        io::stdin().lock().read_line(&mut line)
    } else {
        fs::File::open(file).and_then(|file| io::BufReader::new(file).read_line(&mut line))
    };
    read.map_err(|error| Failure::new(Exit::Usage, format!("--token-file {}: {error}", file.display())))?;
    Ok(line)
}

//! `claim`, which binds a value to a request id, and `once --forget`.

use leasehold::bindings::Claimed;
use serde_json::{Value, json};

use crate::cli::{ClaimArgs, OnceArgs};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::store::Choice;

/// Binds a value unless one is bound already, and prints the bound value.
pub(crate) async fn claim(args: ClaimArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let locks = store.connect().await?;
    let mine = Value::String(args.value);
    let claimed = locks.bindings::<Value>().try_create(args.id.as_str(), &mine, args.lease.duration()).await?;
    let (created, value, claim_id) = match claimed {
        Claimed::Created(claim) => (true, mine, claim),
        Claimed::Exists(found) => (false, found.value, found.claim),
    };
    if json {
        output::json(
            &json!({ "id": args.id.as_str(), "created": created, "value": value, "claim_id": claim_id.as_str() }),
        )?;
    } else {
        // Another program may have bound a value that is not a string.
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        output::data(&(text + "\n"))?;
    }
    locks.shutdown().await;
    Ok(Exit::Done)
}

/// Removes the stored result of `once`, so that the next run executes its command.
pub(crate) async fn forget(args: &OnceArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let locks = store.connect().await?;
    let forgotten = locks.once(args.id.as_str()).forget().await?;
    if json {
        output::json(&json!({ "id": args.id.as_str(), "forgotten": forgotten }))?;
    } else {
        let id = &args.id;
        output::message(&if forgotten { format!("{id} is forgotten") } else { format!("{id} has no stored result") });
    }
    locks.shutdown().await;
    Ok(Exit::Done)
}

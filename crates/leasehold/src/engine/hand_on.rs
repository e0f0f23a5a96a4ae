//! Hands a lease on to another token.

use std::sync::Arc;

use super::core::Core;
use super::lease_cell::LeaseCell;
use super::leases::Leases;
use super::leaving::Undo;
use crate::client::by_token::{Confirmed, confirmed};
use crate::client::retry::Retry;
use crate::clock::{Moment, sleep, wall_ms};
use crate::error::Error;
use crate::facts::Token;
use crate::store::{AcquireRequest, Operation, Renewal};

/// Makes a lease of this process that of a token, which may be its own, and of no process. It lasts its full ttl
/// from some moment of this call. Dropped or failed, the lock is released unless it was handed on.
pub(super) async fn hand_on(core: &Arc<Core>, leases: &Leases, cell: &LeaseCell, to: &Token) -> Result<(), Error> {
    let _call = core.call();
    let began = Moment::now();
    // From here on it is not renewed: a renewal after this one would find another token.
    leases.remove(cell);
    let (undo, renewal, published) = {
        let state = cell.state();
        let (name, token, ttl, owner) = (cell.name.clone(), cell.token.clone(), state.ttl, state.owner.clone());
        let rewrite = Some(owner.clone());
        let renewal = Renewal {
            name: name.clone(),
            token: token.clone(),
            fence: cell.fence,
            ttl,
            prolong: true,
            rewrite,
            hand_to: Some(to.clone()),
        };
        let claim = AcquireRequest { name, token, ttl, owner, fenced: cell.fenced, listens: true, since_ms: wall_ms() };
        // A leave, not a release: a lease that was handed on before an answer was lost is no violation.
        (Undo::arm(core, claim), renewal, state.published)
    };
    let lost = |why| {
        leases.lose_removed(cell, why);
        Err(Error::Lost { name: cell.name.clone(), why })
    };
    let already_lost = cell.state().lost;
    if let Some(why) = already_lost {
        return lost(why);
    }
    let mut retry = Retry::new();
    loop {
        let (asked_at, answer) = core.renew(renewal.clone()).await;
        let error = match confirmed(Moment::now(), asked_at, renewal.ttl, &answer) {
            Confirmed::Yes => {
                let claim = undo.disarm();
                // Nothing renews it, so nothing would publish it later.
                if !published {
                    core.publisher.granted(&claim.name, to, &claim.owner.to_string(), cell.fence, claim.ttl);
                }
                return Ok(());
            }
            Confirmed::Lost(why) => return lost(why),
            Confirmed::Unknown(error) => error,
        };
        match core.decide(|cx| retry.failed(cx, began, &error)) {
            Some(pause) => sleep(pause).await,
            None => return Err(core.store_error(Operation::Renew, &cell.name, error)),
        }
    }
}

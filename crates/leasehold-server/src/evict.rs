//! Taking a lock away, from the holder that was looked at and from nobody else.

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use leasehold::{EvictMode, EvictOutcome, Evicted, EvictedView, Holder, HolderId, LockName};
use serde::Deserialize;

use crate::App;
use crate::answer::{Problem, Said};
use crate::asked::{Name, Sent, reason};
use crate::audit::Line;
use crate::keys::Caller;

/// Takes a lock away.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Evict {
    /// The holder that was looked at: from `holder_id` of the lock.
    #[schema(example = "7f3a91c2b04d")]
    holder_id: String,
    /// How.
    #[serde(default)]
    mode: Mode,
    /// Why, for those who read the events: 1 to 500 bytes.
    reason: String,
}

/// How a lock is taken away.
#[derive(Debug, Clone, Copy, Default, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// The holder is told to stop and its renewals are refused; the lock passes on when it releases or its lease
    /// ends. Never makes two holders.
    #[default]
    Revoke,
    /// The lock is free at once. A holder that is still at work does not know: only fences protect what it
    /// writes.
    Force,
}

/// Take a lock away from its holder
///
/// Only the holder that is named is meant: when the lock has changed hands meanwhile, nothing is done. A lock
/// that is free already is no error: `released` is false then.
#[utoipa::path(post, path = "/api/v1/locks/{name}/evict", tag = "locks", request_body = Evict,
    params(("name" = String, Path, description = "the lock; percent-encoded, `/` as `%2F`")),
    responses((status = 200, body = EvictedView), (status = 400, body = Said),
        (status = 409, description = "`changed_hands`: somebody else holds it; `foreign_holder`: it can only be forced", body = Said)))]
pub(crate) async fn evict(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Name(name): Name,
    Sent(asked): Sent<Evict>,
) -> Result<Json<EvictedView>, Problem> {
    let holder = HolderId::parse(&asked.holder_id)?;
    let reason = reason(&asked.reason)?;
    let mode = match asked.mode {
        Mode::Revoke => EvictMode::Revoke,
        Mode::Force => EvictMode::Force,
    };
    Ok(Json(take_away(&app, &caller, &name, holder, mode, reason).await?))
}

/// Does it, writes down who did it, and says what became of it.
pub(crate) async fn take_away(
    app: &App,
    caller: &Caller,
    name: &LockName,
    holder: HolderId,
    mode: EvictMode,
    reason: &str,
) -> Result<EvictedView, Problem> {
    let write = |outcome: &str, of: Option<&Holder>| {
        let owner = of.map(|holder| holder.owner.to_string());
        let line = Line {
            outcome,
            action: if mode == EvictMode::Force { "force" } else { "revoke" },
            name: name.as_str(),
            reason,
            who: caller.who(),
            key_id: caller.key.as_ref().map(|key| key.id.as_str()),
            holder_id: holder.as_str(),
            owner: owner.as_deref(),
            fence: of.and_then(|holder| holder.fence).map(leasehold::Fence::get),
        };
        tracing::info!(target: "leasehold_server::audit", ?line, "eviction");
        app.audit.as_ref().map_or(Ok(()), |audit| audit.write(&line))
    };
    // First: what cannot be written down is not done.
    if write("asked", None).is_err() {
        return Err(Problem::not_audited().about(name));
    }
    let conflict = |code, text| Problem::new(StatusCode::CONFLICT, code, text).about(name);
    let (outcome, of, answer) = match app.locks.evict(name, holder, mode, reason).await? {
        Evicted::Done(old) => {
            let view = EvictedView::done(name, mode, old.clone());
            (if view.outcome == EvictOutcome::Forced { "forced" } else { "revoked" }, Some(old), Ok(view))
        }
        Evicted::Free => ("free", None, Ok(EvictedView::free(name))),
        Evicted::ChangedHands(now) => {
            let text =
                format!("{name} has changed hands: {} (id {}) holds it now; nothing was done", now.owner, now.id);
            ("changed_hands", None, Err(conflict("changed_hands", text).held_by(&now)))
        }
        Evicted::Foreign(now) => {
            let text = format!(
                "{name} is held by another kind of client ({}), which cannot be asked to stop: wait for it, or use force",
                now.owner
            );
            ("foreign_holder", None, Err(conflict("foreign_holder", text).held_by(&now)))
        }
    };
    // It is done, and that it was to be done stands there already.
    let _ = write(outcome, of.as_ref());
    answer
}

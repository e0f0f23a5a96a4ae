//! Evictions. Only the holder named in the request is evicted.

use std::io;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use leasehold::inspect::{EvictMode, Evicted, EvictedView, Holder, HolderId, LockInfo};
use leasehold::{Error, LockName};
use serde::Deserialize;

use crate::App;
use crate::audit::AuditLine;
use crate::caller::Caller;
use crate::extract::{JsonBody, NameParam, validate_reason};
use crate::problem::{Problem, ProblemBody};

/// A request to evict the holder of a lock.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Evict {
    /// The `holder_id` that the lock showed.
    #[schema(example = "7f3a91c2b04d", pattern = "^[0-9a-f]{12}$")]
    holder_id: String,
    /// How to evict the holder.
    #[serde(default)]
    mode: Mode,
    /// The reason, published with the event: 1 to 500 bytes.
    #[schema(min_length = 1, max_length = 500)]
    reason: String,
}

/// How a holder is evicted.
#[derive(Debug, Clone, Copy, Default, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// The holder is asked to stop and cannot renew. The next waiter gets the lock when the holder releases it or its
    /// lease expires, so there are never two holders.
    #[default]
    Revoke,
    /// The lock is free at once. A holder that is still running is not notified; only fences protect what it writes.
    Force,
}

/// Evict the holder of a lock
///
/// Only the named holder is evicted. If the lock has changed hands, nothing is changed. If the lock is already free,
/// `released` is false.
#[utoipa::path(post, path = "/api/v1/locks/{name}/evict", tag = "locks", request_body = Evict,
    params(("name" = String, Path, description = "the lock; percent-encoded, `/` as `%2F`")),
    responses((status = 200, body = EvictedView), (status = 400, body = ProblemBody),
        (status = 409, description = "`changed_hands`: another holder has it; `foreign_holder`: it can only be forced", body = ProblemBody)))]
pub(crate) async fn evict(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    NameParam(name): NameParam,
    JsonBody(request): JsonBody<Evict>,
) -> Result<Json<EvictedView>, Problem> {
    let holder = HolderId::parse(&request.holder_id)?;
    let reason = validate_reason(&request.reason)?;
    let mode = match request.mode {
        Mode::Revoke => EvictMode::Revoke,
        Mode::Force => EvictMode::Force,
    };
    Ok(Json(evict_for_caller(&app, &caller, &name, holder, mode, reason).await?))
}

/// Evicts a holder on behalf of a caller, and audits it.
pub(crate) async fn evict_for_caller(
    app: &App,
    caller: &Caller,
    name: &LockName,
    holder: HolderId,
    mode: EvictMode,
    reason: &str,
) -> Result<EvictedView, Problem> {
    let actor = Actor { who: caller.who(), key_id: caller.key.as_ref().map(|key| key.id.as_str()) };
    let conflict = |code, text| Problem::new(StatusCode::CONFLICT, code, text).about(name);
    match evict_audited(app, actor, name, holder, mode, reason, reason).await {
        Ok(Evicted::Done(old)) => Ok(EvictedView::done(name, mode, old)),
        Ok(Evicted::Free) => Ok(EvictedView::free(name)),
        Ok(Evicted::ChangedHands(now)) => {
            let text =
                format!("{name} has changed hands: {} (id {}) holds it now; nothing was done", now.owner, now.id);
            Err(conflict("changed_hands", text).held_by(&now))
        }
        Ok(Evicted::Foreign(now)) => {
            let text = format!(
                "{name} is held by another kind of client ({}), which cannot be revoked: wait, or use force",
                now.owner
            );
            Err(conflict("foreign_holder", text).held_by(&now))
        }
        Err(EvictError::NotAudited) => Err(Problem::not_audited().about(name)),
        Err(EvictError::Store(error)) => Err(error.into()),
    }
}

/// Who acts on a holder, for the audit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Actor<'a> {
    pub(crate) who: &'a str,
    pub(crate) key_id: Option<&'a str>,
}

/// Why an eviction is not known to have happened.
#[derive(Debug)]
pub(crate) enum EvictError {
    /// The audit line could not be written, so nothing was done.
    NotAudited,
    Store(Error),
}

/// Evicts a holder and writes audit lines before and after. `event_reason` is published with the event.
pub(crate) async fn evict_audited(
    app: &App,
    actor: Actor<'_>,
    name: &LockName,
    holder: HolderId,
    mode: EvictMode,
    why: &str,
    event_reason: &str,
) -> Result<Evicted, EvictError> {
    let action = if mode == EvictMode::Force { "force" } else { "revoke" };
    let audited = AuditedAction { app, actor, action, name, holder, why };
    audited.record_start().map_err(|_| EvictError::NotAudited)?;
    let evicted = app.locks.evict(name, holder, mode, event_reason).await;
    match &evicted {
        Ok(Evicted::Done(old)) => {
            audited.record_outcome(if action == "force" { "forced" } else { "revoked" }, Some(old));
        }
        Ok(Evicted::Free) => audited.record_outcome("free", None),
        Ok(Evicted::ChangedHands(_)) => audited.record_outcome("changed_hands", None),
        Ok(Evicted::Foreign(_)) => audited.record_outcome("foreign_holder", None),
        Err(_) => audited.record_outcome("unknown", None),
    }
    evicted.map_err(EvictError::Store)
}

/// An action on a holder, audited twice: before it is done, and with its outcome.
pub(crate) struct AuditedAction<'a> {
    pub(crate) app: &'a App,
    pub(crate) actor: Actor<'a>,
    /// `ask`, `revoke` or `force`.
    pub(crate) action: &'a str,
    pub(crate) name: &'a LockName,
    pub(crate) holder: HolderId,
    pub(crate) why: &'a str,
}

impl AuditedAction<'_> {
    /// Writes the first line. If this fails, the action must not be done.
    pub(crate) fn record_start(&self) -> io::Result<()> {
        self.write("asked", None)
    }

    /// Writes the outcome. The action is done and its first line is on disk, so a failure here changes nothing.
    pub(crate) fn record_outcome(&self, outcome: &str, of: Option<&Holder>) {
        let _ = self.write(outcome, of);
    }

    fn write(&self, outcome: &str, of: Option<&Holder>) -> io::Result<()> {
        let of = of.map(|holder| {
            LockInfo { name: self.name.clone(), holder: Some(holder.clone()), waiters: Vec::new() }.view()
        });
        let line = AuditLine {
            outcome,
            action: self.action,
            name: self.name.as_str(),
            reason: self.why,
            who: self.actor.who,
            key_id: self.actor.key_id,
            holder_id: self.holder.as_str(),
            owner: of.as_ref().and_then(|of| of.owner.as_deref()),
            fence: of.as_ref().and_then(|of| of.fence),
            since_ms: of.as_ref().and_then(|of| of.since_ms),
            last_seen_ms: of.as_ref().and_then(|of| of.last_seen_ms),
        };
        tracing::info!(target: "leasehold_server::audit", ?line, "{}", self.action);
        self.app.audit.as_ref().map_or(Ok(()), |audit| audit.write(&line))
    }
}

//! Taking a lock away, from the holder that was looked at and from nobody else.

use std::io;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use leasehold::{Error, EvictMode, Evicted, EvictedView, Holder, HolderId, LockInfo, LockName};
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
    #[schema(example = "7f3a91c2b04d", pattern = "^[0-9a-f]{12}$")]
    holder_id: String,
    /// How.
    #[serde(default)]
    mode: Mode,
    /// Why, for those who read the events: 1 to 500 bytes.
    #[schema(min_length = 1, max_length = 500)]
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
    let by = By { who: caller.who(), key_id: caller.key.as_ref().map(|key| key.id.as_str()) };
    let conflict = |code, text| Problem::new(StatusCode::CONFLICT, code, text).about(name);
    match evict_audited(app, by, name, holder, mode, reason, reason).await {
        Ok(Evicted::Done(old)) => Ok(EvictedView::done(name, mode, old)),
        Ok(Evicted::Free) => Ok(EvictedView::free(name)),
        Ok(Evicted::ChangedHands(now)) => {
            let text =
                format!("{name} has changed hands: {} (id {}) holds it now; nothing was done", now.owner, now.id);
            Err(conflict("changed_hands", text).held_by(&now))
        }
        Ok(Evicted::Foreign(now)) => {
            let text = format!(
                "{name} is held by another kind of client ({}), which cannot be asked to stop: wait for it, or use force",
                now.owner
            );
            Err(conflict("foreign_holder", text).held_by(&now))
        }
        Err(NotDone::NotAudited) => Err(Problem::not_audited().about(name)),
        Err(NotDone::Store(error)) => Err(error.into()),
    }
}

/// Who does something to a holder.
#[derive(Debug, Clone, Copy)]
pub(crate) struct By<'a> {
    pub(crate) who: &'a str,
    pub(crate) key_id: Option<&'a str>,
}

/// Why nothing is known to be done.
#[derive(Debug)]
pub(crate) enum NotDone {
    /// What cannot be written down is not done.
    NotAudited,
    Store(Error),
}

/// Takes a lock away, written down before and after. `told` is what those who follow the events read.
pub(crate) async fn evict_audited(
    app: &App,
    by: By<'_>,
    name: &LockName,
    holder: HolderId,
    mode: EvictMode,
    why: &str,
    told: &str,
) -> Result<Evicted, NotDone> {
    let action = if mode == EvictMode::Force { "force" } else { "revoke" };
    let written = Written { app, by, action, name, holder, why };
    written.begins().map_err(|_| NotDone::NotAudited)?;
    let evicted = app.locks.evict(name, holder, mode, told).await;
    match &evicted {
        Ok(Evicted::Done(old)) => written.ends(if action == "force" { "forced" } else { "revoked" }, Some(old)),
        Ok(Evicted::Free) => written.ends("free", None),
        Ok(Evicted::ChangedHands(_)) => written.ends("changed_hands", None),
        Ok(Evicted::Foreign(_)) => written.ends("foreign_holder", None),
        Err(_) => written.ends("unknown", None),
    }
    evicted.map_err(NotDone::Store)
}

/// What is done to a holder, as the audit has it: once before, and once with what became of it.
pub(crate) struct Written<'a> {
    pub(crate) app: &'a App,
    pub(crate) by: By<'a>,
    /// `ask`, `revoke` or `force`.
    pub(crate) action: &'a str,
    pub(crate) name: &'a LockName,
    pub(crate) holder: HolderId,
    pub(crate) why: &'a str,
}

impl Written<'_> {
    /// First: what cannot be written down is not done.
    pub(crate) fn begins(&self) -> io::Result<()> {
        self.write("asked", None)
    }

    /// It is done, and that it was to be done stands there already.
    pub(crate) fn ends(&self, outcome: &str, of: Option<&Holder>) {
        let _ = self.write(outcome, of);
    }

    fn write(&self, outcome: &str, of: Option<&Holder>) -> io::Result<()> {
        let of = of.map(|holder| {
            LockInfo { name: self.name.clone(), holder: Some(holder.clone()), waiters: Vec::new() }.view()
        });
        let line = Line {
            outcome,
            action: self.action,
            name: self.name.as_str(),
            reason: self.why,
            who: self.by.who,
            key_id: self.by.key_id,
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

//! Doing what was judged to be right: written down first, compared with the holder that was looked at, and told.

use leasehold::{Asked, EvictMode, Evicted, Holder, LockName};
use serde::Serialize;

use super::judge::Action;
use crate::App;
use crate::evict::{By, NotDone, Written, evict_audited};

/// Who acts, for the audit.
const WHO: By<'static> = By { who: "monitor", key_id: None };
/// What those who follow the events read.
const FORCED: &str = "forced_by_monitor";
const REVOKED: &str = "revoked_by_monitor";

/// Something the monitor did, or found that it must not do.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
pub(crate) struct Done {
    /// When.
    pub(crate) at_ms: u64,
    /// `ask`, `revoke` or `force`.
    #[schema(value_type = String, example = "force")]
    pub(crate) action: &'static str,
    /// The lock.
    pub(crate) name: String,
    /// The holder it was meant for.
    pub(crate) holder_id: String,
    /// The same, for people.
    pub(crate) owner: String,
    /// `told`, `revoked`, `forced`; `free`: it was given back meanwhile; `changed_hands`: somebody else holds it,
    /// and was left alone; `deaf`: it could not be told; `failed`.
    #[schema(value_type = String, example = "forced")]
    pub(crate) outcome: &'static str,
    /// Why.
    pub(crate) reason: String,
}

/// Whether an action came to its end, whatever that was.
pub(super) enum End {
    /// It did; the holder has lost its lock, or had given it back.
    Over,
    /// It was told something, and has its lock.
    Told,
    /// Not done: the store or the audit failed.
    Failed,
}

/// Acts on the holder that was looked at, and on nobody else.
pub(super) async fn act(app: &App, name: &LockName, holder: &Holder, action: Action, at_ms: u64) -> End {
    let (what, why, outcome, end) = match action {
        Action::Ask { why, .. } => {
            let (outcome, end) = ask(app, name, holder, &why).await;
            ("ask", why, outcome, end)
        }
        Action::Evict { mode, why } => {
            let (outcome, end) = take_away(app, name, holder, mode, &why).await;
            (if mode == EvictMode::Force { "force" } else { "revoke" }, why, outcome, end)
        }
    };
    app.metrics.monitor.acted(what, outcome);
    app.monitor.did(Done {
        at_ms,
        action: what,
        name: name.to_string(),
        holder_id: holder.id.to_string(),
        owner: holder.owner.to_string(),
        outcome,
        reason: why,
    });
    end
}

async fn take_away(app: &App, name: &LockName, holder: &Holder, mode: EvictMode, why: &str) -> (&'static str, End) {
    let told = if mode == EvictMode::Force { FORCED } else { REVOKED };
    match evict_audited(app, WHO, name, holder.id, mode, why, told).await {
        Ok(Evicted::Done(old)) if mode == EvictMode::Force => {
            tracing::warn!(%name, owner = %old.owner, holder = %old.id, why, "the monitor took a lock away by force");
            ("forced", End::Over)
        }
        Ok(Evicted::Done(old)) => {
            tracing::warn!(%name, owner = %old.owner, holder = %old.id, why, "the monitor revoked a lock");
            ("revoked", End::Told)
        }
        Ok(Evicted::ChangedHands(now)) => {
            tracing::info!(%name, looked_at = %holder.id, now = %now.id, "changed hands meanwhile: skipped, and nobody was harmed");
            ("changed_hands", End::Over)
        }
        Ok(Evicted::Free) => {
            tracing::info!(%name, looked_at = %holder.id, "free already");
            ("free", End::Over)
        }
        Ok(Evicted::Foreign(_)) => {
            tracing::info!(%name, looked_at = %holder.id, "another kind of client cannot be revoked");
            ("foreign_holder", End::Told)
        }
        Err(NotDone::NotAudited) => {
            tracing::error!(%name, "the audit cannot be written, so nothing was taken away");
            ("failed", End::Failed)
        }
        Err(NotDone::Store(error)) => {
            tracing::warn!(%name, %error, "whether it was taken away is not known");
            ("failed", End::Failed)
        }
    }
}

async fn ask(app: &App, name: &LockName, holder: &Holder, why: &str) -> (&'static str, End) {
    let written = Written { app, by: WHO, action: "ask", name, holder: holder.id, why };
    if written.begins().is_err() {
        return ("failed", End::Failed);
    }
    let (outcome, of, end) = match app.locks.ask_to_finish(name, holder.id, why).await {
        Ok(Asked::Told(of)) => ("told", Some(of), End::Told),
        Ok(Asked::Deaf(of)) => ("deaf", Some(of), End::Told),
        Ok(Asked::ChangedHands(_)) => ("changed_hands", None, End::Over),
        Ok(Asked::Free) => ("free", None, End::Over),
        Err(error) => {
            tracing::warn!(%name, %error, "whether the holder was asked to finish is not known");
            ("failed", None, End::Failed)
        }
    };
    written.ends(outcome, of.as_ref());
    tracing::info!(%name, owner = %holder.owner, holder = %holder.id, outcome, why, "asked to finish");
    (outcome, end)
}

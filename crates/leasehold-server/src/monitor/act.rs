//! Carries out the judge's verdict: audited first, applied only to the holder that was judged, and published as an
//! event.

use leasehold::LockName;
use leasehold::inspect::{EvictMode, Evicted, FinishRequest, Holder};
use serde::Serialize;

use super::judge::Action;
use crate::App;
use crate::evict::{Actor, AuditedAction, EvictError, evict_audited};

/// The actor in audit lines.
const MONITOR: Actor<'static> = Actor { who: "monitor", key_id: None };
/// The reasons published with the events.
const FORCED_REASON: &str = "forced_by_monitor";
const REVOKED_REASON: &str = "revoked_by_monitor";

/// An action of the monitor, or one that it skipped.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
#[schema(as = Done)]
pub(crate) struct ActionView {
    /// When the monitor acted, in wall-clock milliseconds.
    pub(crate) at_ms: u64,
    /// `ask`, `revoke` or `force`.
    #[schema(value_type = String, example = "force")]
    pub(crate) action: &'static str,
    /// The name of the lock.
    pub(crate) name: String,
    /// The id of the holder that the action was meant for.
    pub(crate) holder_id: String,
    /// The holder, for people.
    pub(crate) owner: String,
    /// `told`: the holder was notified; `revoked`; `forced`; `free`: the lock was released meanwhile; `changed_hands`:
    /// it has another holder, which was left alone; `deaf`: the holder cannot be notified; `failed`.
    #[schema(value_type = String, example = "forced")]
    pub(crate) outcome: &'static str,
    /// The reason.
    pub(crate) reason: String,
}

/// The effect of an action on its holder.
pub(super) enum Effect {
    /// The holder has lost or released its lock.
    NoLongerHeld,
    /// The holder was notified and still has its lock.
    StillHeld,
    /// Nothing was done, because the store or the audit failed.
    Failed,
}

/// Acts on the holder that was judged, and on no other.
pub(super) async fn act(app: &App, name: &LockName, holder: &Holder, action: Action, at_ms: u64) -> Effect {
    let (what, why, outcome, end) = match action {
        Action::Ask { why, .. } => {
            let (outcome, end) = ask(app, name, holder, &why).await;
            ("ask", why, outcome, end)
        }
        Action::Evict { mode, why } => {
            let (outcome, end) = evict(app, name, holder, mode, &why).await;
            (if mode == EvictMode::Force { "force" } else { "revoke" }, why, outcome, end)
        }
    };
    app.metrics.monitor.count_action(what, outcome);
    app.monitor.record_action(ActionView {
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

async fn evict(app: &App, name: &LockName, holder: &Holder, mode: EvictMode, why: &str) -> (&'static str, Effect) {
    let event_reason = if mode == EvictMode::Force { FORCED_REASON } else { REVOKED_REASON };
    match evict_audited(app, MONITOR, name, holder.id, mode, why, event_reason).await {
        Ok(Evicted::Done(old)) if mode == EvictMode::Force => {
            tracing::warn!(%name, owner = %old.owner, holder = %old.id, why, "the monitor evicted a holder by force");
            ("forced", Effect::NoLongerHeld)
        }
        Ok(Evicted::Done(old)) => {
            tracing::warn!(%name, owner = %old.owner, holder = %old.id, why, "the monitor revoked a lease");
            ("revoked", Effect::StillHeld)
        }
        Ok(Evicted::ChangedHands(now)) => {
            tracing::info!(%name, looked_at = %holder.id, now = %now.id, "the lock has changed hands, so nothing was done");
            ("changed_hands", Effect::NoLongerHeld)
        }
        Ok(Evicted::Free) => {
            tracing::info!(%name, looked_at = %holder.id, "the lock is already free");
            ("free", Effect::NoLongerHeld)
        }
        Ok(Evicted::Foreign(_)) => {
            tracing::info!(%name, looked_at = %holder.id, "a foreign holder cannot be revoked");
            ("foreign_holder", Effect::StillHeld)
        }
        Err(EvictError::NotAudited) => {
            tracing::error!(%name, "the audit cannot be written, so the holder was not evicted");
            ("failed", Effect::Failed)
        }
        Err(EvictError::Store(error)) => {
            tracing::warn!(%name, error = %format_args!("{error:#}"), "unknown whether the holder was evicted");
            ("failed", Effect::Failed)
        }
    }
}

async fn ask(app: &App, name: &LockName, holder: &Holder, why: &str) -> (&'static str, Effect) {
    let audited = AuditedAction { app, actor: MONITOR, action: "ask", name, holder: holder.id, why };
    if audited.record_start().is_err() {
        return ("failed", Effect::Failed);
    }
    let (outcome, of, end) = match app.locks.ask_to_finish(name, holder.id, why).await {
        Ok(FinishRequest::Delivered(of)) => ("told", Some(of), Effect::StillHeld),
        Ok(FinishRequest::Undeliverable(of)) => ("deaf", Some(of), Effect::StillHeld),
        Ok(FinishRequest::ChangedHands(_)) => ("changed_hands", None, Effect::NoLongerHeld),
        Ok(FinishRequest::Free) => ("free", None, Effect::NoLongerHeld),
        Err(error) => {
            tracing::warn!(%name, error = %format_args!("{error:#}"), "unknown whether the holder was asked to finish");
            ("failed", None, Effect::Failed)
        }
    };
    audited.record_outcome(outcome, of.as_ref());
    tracing::info!(%name, owner = %holder.owner, holder = %holder.id, outcome, why, "asked the holder to finish");
    (outcome, end)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold::config::GpuLockMonitor;
    use leasehold::{Guard, LockManager};
    use leasehold_testkit::RedisServer;

    use super::*;
    use crate::Settings;
    use crate::clock::unix_ms;
    use crate::monitor::judge::{Past, Rules, judge};

    const HOUR_MS: u64 = 3_600_000;

    fn name() -> LockName {
        LockName::new("gpu_lock:0").expect("a name")
    }

    /// Returns the holder, and the action that the monitor would take an hour later.
    async fn observed(app: &App, rules: &Rules) -> (Holder, Action) {
        let holder = app.locks.holder(&name()).await.expect("answered").expect("held");
        let (now_ms, past) = (unix_ms() + HOUR_MS, Past::new(&holder, 0));
        let action = judge(&name(), &holder, &past, now_ms, rules).action.expect("over its limit");
        (holder, action)
    }

    async fn is_unharmed(guard: Guard, name: &str) {
        assert!(guard.is_valid() && guard.loss().is_none(), "{name}");
        assert!(guard.release().await.expect("answered"), "{name}: it was still its own");
    }

    fn audited(path: &std::path::Path, outcome: &str) -> usize {
        let text = std::fs::read_to_string(path).expect("written");
        let outcome = format!("\"outcome\":\"{outcome}\"");
        text.lines().filter(|line| line.contains(&outcome) && line.contains("\"who\":\"monitor\"")).count()
    }

    /// The monitor sees A over its limit; A releases the lock and B acquires it before the monitor acts.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_delayed_eviction_does_not_affect_the_next_holder() {
        let (redis, dir) = (RedisServer::start().await, tempfile::tempdir().expect("a directory"));
        let mut settings = Settings::default();
        let audit = dir.path().join("audit.jsonl");
        settings.audit = Some(audit.clone());
        let connect = async || LockManager::connect(&redis.url()).await.expect("a store");
        let app = App::new(connect().await, settings).unwrap_or_else(|error| panic!("{error}"));
        let (a, b) = (connect().await, connect().await);
        let mut rules = Rules::from(&GpuLockMonitor::default());
        rules.evict_living = true;
        let ask = |locks: &LockManager, who| locks.lock("gpu_lock:0").owner(who).ttl(Duration::from_secs(60));
        let mut skipped = 0;
        for round in 0..200 {
            let held = ask(&a, "A").await.expect("free");
            let (looked_at, action) = observed(&app, &rules).await;
            // The judge would revoke. A forced eviction compares the holder id too.
            let action = match action {
                Action::Evict { why, .. } if round % 2 == 0 => Action::Evict { mode: EvictMode::Force, why },
                action => action,
            };
            held.release().await.expect("answered");
            let next = ask(&b, "B").await.expect("free");
            let end = act(&app, &name(), &looked_at, action, unix_ms()).await;
            assert!(matches!(end, Effect::NoLongerHeld));
            skipped += usize::from(app.monitor.lock().actions.back().expect("recorded").outcome == "changed_hands");
            is_unharmed(next, "B").await;
        }
        assert_eq!((skipped, audited(&audit, "changed_hands")), (200, 200), "skipped and written down");

        // The same concurrently: whatever the order, B is never evicted.
        let mut evicted = 0;
        for round in 0..200 {
            let held = ask(&a, "A").await.expect("free");
            let (looked_at, action) = observed(&app, &rules).await;
            let handed_on = async {
                // Earlier or later than the eviction, which writes to disk first.
                for _ in 0..round % 40 * 10 {
                    tokio::task::yield_now().await;
                }
                let _ = held.release().await;
                ask(&b, "B").await.expect("free")
            };
            let (name, now_ms) = (name(), unix_ms());
            let (next, _) = tokio::join!(handed_on, act(&app, &name, &looked_at, action, now_ms));
            evicted += usize::from(app.monitor.lock().actions.back().expect("recorded").outcome == "revoked");
            is_unharmed(next, "B").await;
        }
        println!("monitor race: 200 of 200 delayed evictions skipped; at once: {evicted} of 200 hit A, 0 of 400 hit B");

        // The lock was released and is free: that is reported, and is no error.
        let held = ask(&a, "A").await.expect("free");
        let (looked_at, action) = observed(&app, &rules).await;
        held.release().await.expect("answered");
        assert!(matches!(act(&app, &name(), &looked_at, action, unix_ms()).await, Effect::NoLongerHeld));
        assert_eq!(app.monitor.lock().actions.back().expect("recorded").outcome, "free");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_action_that_cannot_be_audited_is_not_done() {
        let settings = Settings { audit: Some("/dev/full".into()), ..Settings::default() };
        let locks = LockManager::connect("memory:").await.expect("a store");
        let app = App::new(locks.clone(), settings).unwrap_or_else(|error| panic!("{error}"));
        let guard = locks.lock("gpu_lock:0").await.expect("free");
        let mut rules = Rules::from(&GpuLockMonitor::default());
        for evict_living in [true, false] {
            rules.evict_living = evict_living;
            let (looked_at, action) = observed(&app, &rules).await;
            assert!(matches!(act(&app, &name(), &looked_at, action, 0).await, Effect::Failed));
        }
        is_unharmed(guard, "it").await;
    }
}

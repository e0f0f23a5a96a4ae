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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold::config::GpuLockMonitor;
    use leasehold::{Guard, LockManager};
    use leasehold_testkit::RedisServer;

    use super::*;
    use crate::monitor::judge::{Past, Rules, judge};
    use crate::{Settings, wall_ms};

    const HOUR_MS: u64 = 3_600_000;

    fn name() -> LockName {
        LockName::new("gpu_lock:0").expect("a name")
    }

    /// What the monitor sees of the holder, and what it is about to do, an hour later.
    async fn observed(app: &App, rules: &Rules) -> (Holder, Action) {
        let holder = app.locks.holder(&name()).await.expect("answered").expect("held");
        let (now_ms, past) = (wall_ms() + HOUR_MS, Past::new(&holder, 0));
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

    /// A is seen over its limit, gives its lock back, and B takes it before the monitor acts.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_delayed_eviction_of_a_never_harms_b() {
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
            // The judge would revoke; a forced eviction is compared likewise.
            let action = match action {
                Action::Evict { why, .. } if round % 2 == 0 => Action::Evict { mode: EvictMode::Force, why },
                action => action,
            };
            held.release().await.expect("answered");
            let next = ask(&b, "B").await.expect("free");
            let end = act(&app, &name(), &looked_at, action, wall_ms()).await;
            assert!(matches!(end, End::Over));
            skipped += usize::from(app.monitor.lock().done.back().expect("told").outcome == "changed_hands");
            is_unharmed(next, "B").await;
        }
        assert_eq!((skipped, audited(&audit, "changed_hands")), (200, 200), "skipped and written down");

        // The same with everything at once: whoever comes first, B is never the one that is evicted.
        let mut evicted = 0;
        for round in 0..200 {
            let held = ask(&a, "A").await.expect("free");
            let (looked_at, action) = observed(&app, &rules).await;
            let handed_on = async {
                // Sooner or later than the eviction, which writes to the disk first.
                for _ in 0..round % 40 * 10 {
                    tokio::task::yield_now().await;
                }
                let _ = held.release().await;
                ask(&b, "B").await.expect("free")
            };
            let (name, now_ms) = (name(), wall_ms());
            let (next, _) = tokio::join!(handed_on, act(&app, &name, &looked_at, action, now_ms));
            evicted += usize::from(app.monitor.lock().done.back().expect("told").outcome == "revoked");
            is_unharmed(next, "B").await;
        }
        println!("monitor race: 200 of 200 delayed evictions skipped; at once: {evicted} of 200 hit A, 0 of 400 hit B");

        // Given back, and nobody took it: said, and no error.
        let held = ask(&a, "A").await.expect("free");
        let (looked_at, action) = observed(&app, &rules).await;
        held.release().await.expect("answered");
        assert!(matches!(act(&app, &name(), &looked_at, action, wall_ms()).await, End::Over));
        assert_eq!(app.monitor.lock().done.back().expect("told").outcome, "free");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_cannot_be_written_down_is_not_done() {
        let settings = Settings { audit: Some("/dev/full".into()), ..Settings::default() };
        let locks = LockManager::connect("memory:").await.expect("a store");
        let app = App::new(locks.clone(), settings).unwrap_or_else(|error| panic!("{error}"));
        let guard = locks.lock("gpu_lock:0").await.expect("free");
        let mut rules = Rules::from(&GpuLockMonitor::default());
        for evict_living in [true, false] {
            rules.evict_living = evict_living;
            let (looked_at, action) = observed(&app, &rules).await;
            assert!(matches!(act(&app, &name(), &looked_at, action, 0).await, End::Failed));
        }
        is_unharmed(guard, "it").await;
    }
}

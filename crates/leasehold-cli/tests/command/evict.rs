//! `evict` takes a lock from the expected holder only.

use std::time::Duration;

use crate::common::{Place, in_terminal};
use leasehold::LossReason;

#[tokio::test]
async fn a_revoked_holder_is_notified() {
    for place in Place::each().await {
        let locks = place.manager().await;
        let guard = locks.lock("a").await.expect("ours");
        let id = guard.holder_id().to_string();
        let wrong = place.run(&["evict", "a", "--expect", "000000000000", "--yes"]);
        assert_eq!(wrong.code, 76, "{wrong:?}");
        assert!(wrong.err.contains(&id) && guard.loss().is_none(), "nothing was done: {wrong:?}");
        let done = place.json(&["evict", "a", "--expect", &id, "--reason", "a test", "--yes"]);
        assert_eq!((&done["outcome"], &done["holder_id"]), (&"revoked".into(), &id.as_str().into()));
        let why = tokio::time::timeout(Duration::from_secs(5), guard.lost()).await;
        assert_eq!(why.expect("notified at once"), LossReason::Revoked);
        assert!(guard.release().await.expect("answered"));
        let free = place.run(&["evict", "a", "--yes"]);
        assert!(free.code == 0 && free.err.contains("a is already free"), "{free:?}");
        assert_eq!(place.json(&["evict", "a", "--yes"])["outcome"], "free");
    }
}

#[tokio::test]
async fn a_revoked_lease_can_be_released_but_not_renewed() {
    for place in Place::each().await {
        let token = place.ok(&["acquire", "a", "--ttl", "1m"]).lines().next().expect("a token").to_owned();
        assert_eq!(place.run(&["evict", "a", "--yes"]).code, 0);
        assert_eq!(place.json(&["why", "a"])["revoked"], true);
        let refused = place.with_token(&token, &["renew", "a"]);
        assert!(refused.code == 76 && refused.err.contains("taken away"), "{refused:?}");
        assert_eq!(place.with_token(&token, &["release", "a"]).code, 0, "its holder can still release it");
        assert_eq!(place.run(&["acquire", "a", "--ttl", "1m"]).code, 0);
        assert_eq!(place.run(&["evict", "a", "--force", "--yes"]).code, 0);
        assert_eq!(place.json(&["why", "a"])["held"], false, "force frees at once");
    }
}

#[tokio::test]
async fn a_foreign_holder_is_left_alone_without_force() {
    let place = Place::redis().await;
    place.server.as_ref().expect("a server").command(&["SET", "gpu_lock:1", "other", "PX", "60000"]).await;
    let left = place.run(&["evict", "gpu_lock:1", "--yes"]);
    assert!(left.code == 76 && left.err.contains("--force"), "{left:?}");
    assert_eq!(place.json(&["why", "gpu_lock:1"])["foreign"], true);
    assert_eq!(place.run(&["evict", "gpu_lock:1", "--yes", "--force"]).code, 0);
    assert_eq!(place.json(&["why", "gpu_lock:1"])["held"], false);
}

#[test]
fn evict_asks_for_confirmation() {
    let place = Place::sqlite();
    place.ok(&["acquire", "a", "--ttl", "1m", "--owner", "tts"]);
    let no = in_terminal(&place, &["evict", "a", "--force"], "n\n");
    assert_eq!(no.code, 1, "{no:?}");
    assert!(no.out.contains("only fences protect what it writes") && no.out.contains("tts@"), "{no:?}");
    assert_eq!(place.json(&["why", "a"])["held"], true);
    let yes = in_terminal(&place, &["evict", "a", "--force"], "y\n");
    assert_eq!(yes.code, 0, "{yes:?}");
    assert_eq!(place.json(&["why", "a"])["held"], false);
}

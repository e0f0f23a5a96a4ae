//! `evict`: from the holder that was looked at, and from nobody else.

use std::time::Duration;

use crate::common::{Place, in_terminal};
use leasehold::LossReason;

#[tokio::test]
async fn a_revoked_holder_is_told_and_may_not_renew() {
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
        assert_eq!(why.expect("told at once"), LossReason::Revoked);
        assert!(guard.release().await.expect("answered"));
        let free = place.run(&["evict", "a", "--yes"]);
        assert!(free.code == 0 && free.err.contains("a is free already"), "{free:?}");
        assert_eq!(place.json(&["evict", "a", "--yes"])["outcome"], "free");
    }
}

#[tokio::test]
async fn a_lease_of_a_script_that_was_revoked_cannot_be_renewed() {
    for place in Place::each().await {
        let token = place.ok(&["acquire", "a", "--ttl", "1m"]).lines().next().expect("a token").to_owned();
        assert_eq!(place.run(&["evict", "a", "--yes"]).code, 0);
        assert_eq!(place.json(&["why", "a"])["revoked"], true);
        let refused = place.with_token(&token, &["renew", "a"]);
        assert!(refused.code == 76 && refused.err.contains("taken away"), "{refused:?}");
        assert_eq!(place.with_token(&token, &["release", "a"]).code, 0, "giving it back is still its holder's");
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
fn a_person_is_asked_first() {
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

use leasehold::Owner;
use leasehold::lease::Token;

use super::*;

const NOW: u64 = 1_800_000_000_000;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn rules() -> Rules {
    Rules::from(&GpuLockMonitor::default())
}

fn name(text: &str) -> LockName {
    LockName::new(text).expect("a name")
}

/// A holder that uses this library: when it acquired and last renewed its lease, in seconds before now.
fn ours(held_s: u64, silent_s: u64, ttl_s: u64, connected: Option<bool>) -> Holder {
    Holder {
        id: Token::random().holder_id(),
        owner: Owner::named("tts").expect("valid"),
        fence: None,
        since_ms: NOW - held_s * 1_000,
        ttl: Some(secs(ttl_s)),
        ttl_left: Some(secs(ttl_s).saturating_sub(secs(silent_s))),
        revoked: false,
        foreign: false,
        listens: connected.is_some(),
        connected,
    }
}

/// A holder that uses another kind of client.
fn foreign(left_s: Option<u64>) -> Holder {
    Holder {
        since_ms: 0,
        ttl: None,
        ttl_left: left_s.map(secs),
        foreign: true,
        listens: false,
        connected: None,
        ..ours(0, 0, 1, None)
    }
}

/// The past of a holder that was first seen `seconds` ago and has not changed since.
fn since(holder: &Holder, seconds: u64) -> Past {
    let then = NOW - seconds * 1_000;
    let mut past =
        Past::new(&Holder { ttl_left: holder.ttl_left.map(|left| left + secs(seconds)), ..holder.clone() }, then);
    past.seen_again(holder, NOW);
    past
}

fn judged(lock: &str, holder: &Holder, past: &Past, rules: &Rules) -> (Vec<&'static str>, Option<&'static str>) {
    let verdict = judge(&name(lock), holder, past, NOW, rules);
    let action = verdict.action.map(|action| match action {
        Action::Ask { at: TimeoutLevel::Hard, .. } => "ask again",
        Action::Ask { .. } => "ask",
        Action::Evict { mode: EvictMode::Revoke, .. } => "revoke",
        Action::Evict { mode: EvictMode::Force, .. } => "force",
    });
    (verdict.conditions.iter().map(|condition| condition.kind).collect(), action)
}

/// Judges a holder that has never changed.
fn of(holder: &Holder, rules: &Rules) -> (Vec<&'static str>, Option<&'static str>) {
    judged("gpu_lock:0", holder, &since(holder, 100_000), rules)
}

const WARNING: &str = "lock_over_warning";
const SOFT: &str = "lock_over_soft";
const HARD: &str = "lock_over_hard";
const DEAD: &str = "dead_holder";
const STALE_LOCK: &str = "stale_lock";

#[test]
fn a_living_long_task_is_only_reported_and_asked() {
    let rules = rules();
    for (held_s, expected) in [
        (10, (vec![], None)),
        (299, (vec![], None)),
        (300, (vec![WARNING], None)),
        (600, (vec![WARNING, SOFT], Some("ask"))),
        (900, (vec![WARNING, SOFT, HARD], Some("ask again"))),
        (3_600, (vec![WARNING, SOFT, HARD], Some("ask again"))),
        (86_400, (vec![WARNING, SOFT, HARD], Some("ask again"))),
    ] {
        assert_eq!(of(&ours(held_s, 50, 300, Some(true)), &rules), expected, "held for {held_s} s");
    }
    // The same for a holder that does not renew while its process is connected, and for a lease without a process that
    // somebody renews.
    assert_eq!(of(&ours(3_600, 3_600, 7_200, Some(true)), &rules).1, Some("ask again"));
    assert_eq!(
        of(&ours(3_600, 50, 300, None), &rules),
        (vec![WARNING, SOFT, HARD], None),
        "there is no process to ask"
    );
}

#[test]
fn living_holders_are_evicted_only_if_configured_and_never_by_force() {
    let mut rules = rules();
    rules.evict_living = true;
    assert_eq!(of(&ours(899, 50, 300, Some(true)), &rules).1, Some("ask"));
    assert_eq!(of(&ours(900, 50, 300, Some(true)), &rules).1, Some("revoke"));
    assert_eq!(of(&Holder { revoked: true, ..ours(900, 50, 300, Some(true)) }, &rules).1, None, "revoked already");
    rules.auto_recovery = false;
    assert_eq!(of(&ours(900, 50, 300, Some(true)), &rules).1, Some("ask again"), "nothing is taken away then");
}

#[test]
fn a_dead_lease_of_ours_is_revoked_at_the_hard_level_and_never_forced_inside_its_ttl() {
    let rules = rules();
    // A dead process, a lease that belongs to no process, and one whose process the store cannot check.
    let unknown = |held_s| Holder { listens: true, ..ours(held_s, held_s, 3_600, None) };
    for dead in [|s| ours(s, s, 3_600, Some(false)), |s| ours(s, s, 3_600, None), unknown] {
        assert_eq!(of(&dead(299), &rules).1, None, "not dead yet");
        assert_eq!(of(&dead(400), &rules), (vec![WARNING, DEAD], None), "alerted");
        assert_eq!(of(&dead(899), &rules).1, None, "below the hard level");
        assert_eq!(of(&dead(900), &rules), (vec![WARNING, SOFT, HARD, DEAD], Some("revoke")));
        for held_s in [900, 3_599] {
            assert_eq!(of(&Holder { revoked: true, ..dead(held_s) }, &rules).1, None, "its ttl is the promise");
        }
    }
    // Renewed until it died.
    assert_eq!(of(&ours(5_000, 299, 3_600, Some(false)), &rules).1, None, "not dead yet");
    assert_eq!(of(&ours(5_000, 300, 3_600, Some(false)), &rules).1, Some("revoke"));
}

#[test]
fn a_lease_without_expiry_is_forced_once_its_ttl_is_over() {
    let rules = rules();
    let endless = |held_s| Holder { ttl_left: None, ..ours(held_s, 0, 1_200, None) };
    let at = |holder: &Holder, seen_s| judged("gpu_lock:0", holder, &since(holder, seen_s), &rules);
    assert_eq!(at(&endless(400), 299), (vec![WARNING], None));
    assert_eq!(at(&endless(400), 300), (vec![WARNING, DEAD, STALE_LOCK], None));
    assert_eq!(at(&endless(900), 300).1, Some("revoke"));
    let revoked = Holder { revoked: true, ..endless(5_000) };
    assert_eq!(at(&revoked, 1_200).1, None, "it may have been renewed just before it was first seen");
    assert_eq!(at(&revoked, 1_201).1, Some("force"), "no holder can rely on it any more");
    assert_eq!(at(&endless(5_000), 1_201).1, Some("revoke"), "renewals are refused first");
}

#[test]
fn without_auto_recovery_nothing_is_evicted() {
    let mut rules = rules();
    rules.auto_recovery = false;
    for holder in [ours(2_000, 300, 3_600, Some(false)), ours(2_000, 300, 3_600, None), foreign(Some(60))] {
        assert_eq!(of(&holder, &rules).1, None, "{holder:?}");
    }
    assert_eq!(of(&ours(700, 50, 300, Some(true)), &rules).1, Some("ask"));
}

#[test]
fn a_process_is_not_dead_because_it_reconnects() {
    let rules = rules();
    let holder = ours(3_600, 250, 300, Some(false));
    let mut past = Past::new(&ours(3_600, 200, 300, Some(true)), NOW - 30_000);
    past.seen_again(&holder, NOW);
    assert!(!judged("gpu_lock:0", &holder, &past, &rules).0.contains(&DEAD), "just gone");
    assert!(!judged("a", &holder, &since(&holder, 59), &rules).0.contains(&DEAD), "for less than a heartbeat");
    assert_eq!(judged("a", &holder, &since(&holder, 60), &rules), (vec![DEAD], None), "reported for any lock");
    // Not even if it does not renew.
    let silent = ours(3_600, 3_000, 7_200, Some(false));
    assert_eq!(judged("gpu_lock:0", &silent, &since(&silent, 59), &rules).1, None);
    assert_eq!(judged("gpu_lock:0", &silent, &since(&silent, 60), &rules).1, Some("revoke"));
    past.seen_again(&ours(3_600, 0, 300, Some(true)), NOW + 1);
    assert_eq!(past.gone_since_ms, None, "and back");
}

#[test]
fn a_foreign_holder_is_forced_at_the_hard_level_unless_it_extends_its_lease() {
    let mut rules = rules();
    let at = |seconds, rules: &Rules| {
        let holder = foreign(Some(2_000));
        judged("gpu_lock:0", &holder, &since(&holder, seconds), rules)
    };
    assert_eq!(at(10, &rules), (vec![], None));
    assert_eq!(at(899, &rules), (vec![WARNING, SOFT], None), "it cannot be asked");
    assert_eq!(at(900, &rules), (vec![WARNING, SOFT, HARD], Some("force")));
    let mut prolongs = Past::new(&foreign(Some(60)), NOW - 2_000_000);
    prolongs.seen_again(&foreign(Some(60)), NOW - 100_000);
    assert_eq!(judged("gpu_lock:0", &foreign(Some(60)), &prolongs, &rules).1, None, "alive");
    rules.evict_living = true;
    assert_eq!(judged("gpu_lock:0", &foreign(Some(60)), &prolongs, &rules).1, Some("force"));
    rules.auto_recovery = false;
    assert_eq!(at(900, &rules), (vec![WARNING, SOFT, HARD], None));
}

#[test]
fn only_configured_names_have_levels_and_are_evicted() {
    let mut rules = rules();
    let dead = ours(2_000, 2_000, 7_200, Some(false));
    for lock in ["task_lock:6", "nightly-report", "gpu_lock", ELECTION] {
        assert_eq!(judged(lock, &dead, &since(&dead, 2_000), &rules), (vec![DEAD], None), "{lock}: reported only");
        let script = ours(2_000, 2_000, 7_200, None);
        assert_eq!(
            judged(lock, &script, &since(&script, 2_000), &rules),
            (vec![], None),
            "{lock}: only its ttl counts"
        );
    }
    rules.names = leasehold::config::Setting::parse("*").expect("valid");
    assert_eq!(judged("nightly-report", &dead, &since(&dead, 2_000), &rules).1, Some("revoke"));
    assert_eq!(judged(ELECTION, &dead, &since(&dead, 2_000), &rules).1, None, "never one's own lead");
}

#[test]
fn a_lease_of_more_than_two_hours_is_stale() {
    let rules = rules();
    let kinds = |lock: &str, holder: &Holder| judged(lock, holder, &Past::new(holder, NOW), &rules).0;
    assert_eq!(kinds("task_lock:6", &ours(5, 5, 7_200, None)), [""; 0]);
    assert_eq!(kinds("task_lock:6", &ours(5, 5, 7_201, None)), [STALE_LOCK]);
    assert_eq!(kinds("task_lock:6", &foreign(Some(7_201))), [STALE_LOCK]);
    assert_eq!(kinds("task_lock:6", &foreign(None)), [STALE_LOCK], "it never ends");
    assert_eq!(kinds("anything", &ours(5, 5, 80_000, Some(true))), [STALE_LOCK]);
    assert_eq!(kinds("session:9", &foreign(None)), [""; 0], "other keys in the store are not locks");
    let verdict = judge(&name("a"), &ours(5, 5, 9_000, None), &since(&foreign(None), 1), NOW, &rules);
    let stale = &verdict.conditions[0];
    assert_eq!((stale.level, stale.value), (Level::Warning, Some(9_000.0)));
    assert!(stale.message.starts_with("a: a lease of 2h 30m by tts@"), "{}", stale.message);
}

#[test]
fn durations_are_short() {
    for (seconds, text) in [(3, "3.0s"), (59, "59s"), (75, "1m 15s"), (3_661, "1h 1m"), (90_000, "1d 1h")] {
        assert_eq!(shown(secs(seconds)), text);
    }
}

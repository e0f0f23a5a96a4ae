//! Bugs that `cargo xtask simulate --planted` applies, one at a time, to a copy of the sources. The simulation must find each.

/// A bug: a text in a source file and its replacement.
pub(crate) struct Planted {
    pub(crate) name: &'static str,
    /// The path below `crates/leasehold/src`.
    pub(crate) file: &'static str,
    pub(crate) find: &'static str,
    pub(crate) replace: &'static str,
}

pub(crate) const PLANTED: &[Planted] = &[
    Planted {
        name: "a-renewal-counts-from-its-reply",
        file: "client/renewal.rs",
        find: "if !self.belief.renewed(now, asked_at, sent.ttl.duration()) {",
        replace: "if !self.belief.renewed(now, now, sent.ttl.duration()) {",
    },
    Planted {
        name: "a-re-sent-try-is-trusted",
        file: "store/redis/try_steps.rs",
        find: "if Rule::ResentTryRenewsFirst.applies() { TryStep::Renew(self.fence) } else { self.holds() }",
        replace: "self.holds()",
    },
    Planted {
        name: "a-message-counts-from-its-reading",
        file: "client/renewal.rs",
        find: "belief: Belief::new(now, grant.asked_at, grant.lasts),",
        replace: "belief: Belief::new(now, now, grant.lasts),",
    },
    Planted {
        name: "a-late-message-is-confirmed",
        file: "client/attempt.rs",
        find: "if !is_believable(&grant, cx.now) {",
        replace: "if false {",
    },
    Planted {
        name: "a-lapsed-belief-is-revived",
        file: "lease/belief.rs",
        find: "if Rule::EndedBeliefStaysEnded.applies() && !self.is_valid(now) {",
        replace: "if self.over {",
    },
    Planted {
        name: "a-release-does-not-compare",
        file: "machine/mod.rs",
        find: "if !ours && (Rule::ReleaseComparesToken.applies() || !matches!(self.slot, Slot::Held(_))) {",
        replace: "if !ours && !matches!(self.slot, Slot::Held(_)) {",
    },
    Planted {
        name: "a-room-forgets-to-leave",
        file: "client/room.rs",
        find: "Some(End::TokenUsedUp) | None => out.leave(finished),",
        replace: "Some(End::TokenUsedUp) | None => drop(finished),",
    },
    Planted {
        name: "a-renewal-ignores-a-revocation",
        file: "machine/mod.rs",
        find: "if held.flag == Flag::Revoked && Rule::RenewalRespectsRevocation.applies() {",
        replace: "if false {",
    },
    Planted {
        name: "a-waiter-undoes-a-revocation",
        file: "machine/mod.rs",
        find: "if held.flag == Flag::Uncontended || !Rule::AcquireKeepsRevocation.applies() {",
        replace: "if true {",
    },
    Planted {
        name: "an-eviction-does-not-compare",
        file: "machine/mod.rs",
        find: "if found != holder && Rule::EvictionComparesHolder.applies() {",
        replace: "if false {",
    },
    Planted {
        name: "a-listener-at-the-old-primary-counts",
        file: "simulation/network.rs",
        find: "        connection.node == node\n    }",
        replace: "        connection.node <= node\n    }",
    },
    Planted {
        name: "a-provisional-grant-is-not-confirmed",
        file: "client/renewal.rs",
        find: "Record::Provisional if Rule::ProvisionalGrantIsConfirmed.applies() => {",
        replace: "Record::Provisional if false => {",
    },
    Planted {
        name: "a-set-is-collected-without-the-collector-lock",
        file: "client/pool.rs",
        find: "                self.collects = granted;\n                if granted {",
        replace: "                self.collects = granted;\n                if true {",
    },
    Planted {
        name: "a-pool-returns-a-member-that-was-lost",
        file: "engine/pooling.rs",
        find: "if matches!(next, Do::Done { .. }) && !taken.iter().all(|(_, guard)| is_usable(guard)) {",
        replace: "if false {",
    },
    Planted {
        name: "a-leave-overtakes-its-acquire",
        file: "engine/waiting.rs",
        find: "                ask.abort.abort();\n                let _ = ask.ended.await;",
        replace: "                drop(ask.ended);",
    },
    Planted {
        name: "a-lock-is-handed-over-out-of-order",
        file: "machine/mod.rs",
        find: "let next = self.queue.remove(0);",
        replace: "let next = self.queue.remove(self.queue.len() - 1);",
    },
    Planted {
        name: "a-try-does-not-yield",
        file: "store/redis/try_steps.rs",
        find: "Some(fence) if self.queue && !self.was_written && Rule::TryYieldsToQueue.applies() => TryStep::Yield(fence),",
        replace: "Some(fence) if false => TryStep::Yield(fence),",
    },
    Planted {
        name: "a-lease-is-not-checked",
        file: "client/renewal.rs",
        find: "            check_at: grant.asked_at + check_every(ttl.duration()),",
        replace: "            check_at: grant.asked_at + ttl.duration() * 9,",
    },
];

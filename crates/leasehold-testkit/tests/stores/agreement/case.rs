//! Random sequences of steps, small enough to read when one fails.

use std::fmt;
use std::time::Duration;

use leasehold::inspect::EvictMode;
use proptest::prelude::*;

/// The ttls, all longer than an unconfirmed grant.
pub(crate) const TTLS: [Duration; 3] = [Duration::from_secs(60), Duration::from_secs(120), Duration::from_secs(600)];
/// So long that no grant expires during a case.
pub(crate) const PROVISIONAL: Duration = Duration::from_secs(20);
/// Values of other kinds of clients. The last two look almost like leasehold's.
pub(crate) const FOREIGN: [&str; 4] =
    ["locked_by_tts", "5a0c1ab0-87a1-4a2b-9b0c-a1c0ffee0001", "lh2 0 a newer version", "lh1 0 nearly, but not ours"];

/// A sequence. The indices of claims, clients and names in steps are taken modulo their number.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) clients: usize,
    pub(crate) names: usize,
    pub(crate) claims: Vec<ClaimSpec>,
    pub(crate) steps: Vec<Step>,
}

/// A possible attempt of a client.
#[derive(Debug, Clone)]
pub(crate) struct ClaimSpec {
    pub(crate) client: usize,
    pub(crate) name: usize,
    pub(crate) ttl: usize,
    pub(crate) fenced: bool,
    pub(crate) listens: bool,
}

#[derive(Debug, Clone)]
pub(crate) enum Step {
    Ask {
        verb: Verb,
        claim: usize,
        fate: Fate,
    },
    Renew {
        what: Vec<RenewSpec>,
        fate: Fate,
    },
    /// A token was handed to another claim, which releases it, perhaps late.
    Release {
        claim: usize,
        dead: bool,
        by: usize,
    },
    /// Sends an unanswered request again.
    Resend,
    Evict {
        name: usize,
        whom: Whom,
        mode: EvictMode,
        by: usize,
    },
    Finish {
        name: usize,
        whom: Whom,
        by: usize,
    },
    /// The lease expires.
    Expire {
        name: usize,
    },
    /// A process dies. Its next step starts it again with another address.
    Die {
        client: usize,
        politely: bool,
    },
    /// Many attempts of one process wait, and the process dies.
    Crowd {
        name: usize,
        many: usize,
    },
    /// Another kind of client overwrites the key.
    Foreign {
        name: usize,
        value: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Try,
    Acquire {
        with_ticket: bool,
    },
    Release,
    Leave,
    /// Draws a ticket for a later request.
    Draw,
}

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Answered,
    /// It is carried out, but the reply is lost.
    Lost,
    /// It arrives twice.
    Twice,
}

#[derive(Debug, Clone)]
pub(crate) struct RenewSpec {
    pub(crate) claim: usize,
    /// Uses a token whose process has died instead of the claim's current one.
    pub(crate) dead: bool,
    pub(crate) fence: FenceSpec,
    pub(crate) ttl: usize,
    /// Not a check.
    pub(crate) prolong: bool,
    pub(crate) rewrite: bool,
    /// It is handed to the token of this claim.
    pub(crate) hand_to: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum FenceSpec {
    None,
    /// The fence of the claim's grant, as far as it knows.
    Own,
    /// Any earlier fence of the name.
    Other(usize),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Whom {
    /// The holder of the lock.
    Current,
    /// The owner of this claim, which may have held the lock before.
    Claim(usize),
    Unknown,
}

/// Generates sequences. Those with foreign values are for stores that can have them.
pub(crate) fn cases(foreign: bool) -> impl Strategy<Value = Case> {
    let claims = prop::collection::vec(claim(), 3..=8);
    let steps = prop::collection::vec(step(foreign), 5..=60);
    (2..=4_usize, 1..=2_usize, claims, steps).prop_map(|(clients, names, claims, steps)| Case {
        clients,
        names,
        claims,
        steps,
    })
}

fn claim() -> impl Strategy<Value = ClaimSpec> {
    let likely = |yes: f64| prop::bool::weighted(yes);
    (0..4_usize, 0..2_usize, 0..TTLS.len(), likely(0.8), likely(0.8))
        .prop_map(|(client, name, ttl, fenced, listens)| ClaimSpec { client, name, ttl, fenced, listens })
}

fn step(foreign: bool) -> impl Strategy<Value = Step> {
    let verb = prop_oneof![
        5 => Just(Verb::Try),
        10 => any::<bool>().prop_map(|with_ticket| Verb::Acquire { with_ticket }),
        8 => Just(Verb::Release),
        3 => Just(Verb::Leave),
        4 => Just(Verb::Draw),
    ];
    let ask = (verb, 0..8_usize, fate()).prop_map(|(verb, claim, fate)| Step::Ask { verb, claim, fate });
    let renew = (prop::collection::vec(renewal(), 1..=4), fate()).prop_map(|(what, fate)| Step::Renew { what, fate });
    let release =
        (0..8_usize, any::<bool>(), 0..4_usize).prop_map(|(claim, dead, by)| Step::Release { claim, dead, by });
    let mode = prop_oneof![Just(EvictMode::Revoke), Just(EvictMode::Force)];
    let evict =
        (0..2_usize, whom(), mode, 0..4_usize).prop_map(|(name, whom, mode, by)| Step::Evict { name, whom, mode, by });
    let finish = (0..2_usize, whom(), 0..4_usize).prop_map(|(name, whom, by)| Step::Finish { name, whom, by });
    let die = (0..4_usize, any::<bool>()).prop_map(|(client, politely)| Step::Die { client, politely });
    let many = prop_oneof![6 => 1..5_usize, 3 => 14..19_usize, 1 => Just(210)];
    let crowd = (0..2_usize, many).prop_map(|(name, many)| Step::Crowd { name, many });
    let value = (0..2_usize, 0..FOREIGN.len()).prop_map(|(name, value)| Step::Foreign { name, value });
    prop_oneof![
        52 => ask,
        10 => renew,
        3 => release,
        4 => Just(Step::Resend),
        8 => evict,
        3 => finish,
        5 => (0..2_usize).prop_map(|name| Step::Expire { name }),
        3 => die,
        2 => crowd,
        if foreign { 12 } else { 0 } => value,
    ]
}

fn renewal() -> impl Strategy<Value = RenewSpec> {
    let fence = prop_oneof![
        2 => Just(FenceSpec::None),
        5 => Just(FenceSpec::Own),
        3 => (0..8_usize).prop_map(FenceSpec::Other),
    ];
    let dead = prop::bool::weighted(0.1);
    let hand_to = prop::option::weighted(0.3, 0..8_usize);
    let prolong = prop::bool::weighted(0.7);
    (0..8_usize, dead, fence, 0..TTLS.len(), prolong, any::<bool>(), hand_to).prop_map(
        |(claim, dead, fence, ttl, prolong, rewrite, hand_to)| RenewSpec {
            claim,
            dead,
            fence,
            ttl,
            prolong,
            rewrite,
            hand_to,
        },
    )
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![7 => Just(Fate::Answered), 2 => Just(Fate::Lost), 1 => Just(Fate::Twice)]
}

fn whom() -> impl Strategy<Value = Whom> {
    prop_oneof![
        6 => Just(Whom::Current),
        3 => (0..8_usize).prop_map(Whom::Claim),
        1 => Just(Whom::Unknown),
    ]
}

/// Returns the letter of a client.
pub(crate) struct Letter(pub(crate) usize);

impl fmt::Display for Letter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = u8::try_from(self.0).ok().and_then(|n| b'A'.checked_add(n)).unwrap_or(b'?');
        write!(f, "{}", char::from(letter))
    }
}

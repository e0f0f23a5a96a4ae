//! Requests, in a form that is the same for every store.

use leasehold::inspect::{EvictMode, HolderId};
use leasehold::lease::{Token, Ttl};
use leasehold::store::AcquireRequest;
use leasehold::{LockName, Owner};

use super::case::{Letter, TTLS, Verb};
use super::seen::lock;

/// An attempt of a client's process.
pub(crate) struct Attempt {
    pub(crate) client: usize,
    pub(crate) name: usize,
    pub(crate) claim: AcquireRequest,
    pub(crate) id: HolderId,
}

/// A request, in a form that is the same for every store.
#[derive(Clone)]
pub(crate) enum Request {
    Ask { verb: Verb, attempt: usize },
    Renew { what: Vec<RenewOne>, by: usize },
    Release { attempt: usize, by: usize },
    Evict { name: usize, whom: HolderId, mode: EvictMode, by: usize },
    Finish { name: usize, whom: HolderId, by: usize },
}

#[derive(Clone)]
pub(crate) struct RenewOne {
    pub(crate) attempt: usize,
    pub(crate) fence: FenceOf,
    pub(crate) ttl: Ttl,
    pub(crate) prolong: bool,
    pub(crate) rewrite: Option<Owner>,
    /// The attempt that gets the lease.
    pub(crate) hand_to: Option<usize>,
}

#[derive(Clone, Copy)]
pub(crate) enum FenceOf {
    Nobody,
    Own,
    Rank(usize),
}

impl Attempt {
    /// Fenced, listening, with the shortest ttl.
    pub(crate) fn new(client: usize, name: usize, lock: LockName, number: usize) -> Self {
        let token = Token::random();
        let id = token.holder_id();
        let claim = AcquireRequest {
            name: lock,
            token,
            ttl: Ttl::new(TTLS[0]).expect("a ttl"),
            // With all separators of a record.
            owner: Owner::named(format!("attempt {number} of {}@a:1", Letter(client))).expect("an owner"),
            fenced: true,
            listens: true,
            since_ms: 1_700_000_000_000 + u64::try_from(number).expect("a number"),
        };
        Self { client, name, claim, id }
    }
}

impl Request {
    /// Describes the request.
    pub(crate) fn words(&self, attempts: &[Attempt]) -> String {
        let who = |attempt: &usize| format!("{} (attempt {attempt})", Letter(attempts[*attempt].client));
        match self {
            Request::Ask { verb, attempt } => {
                let what = match verb {
                    Verb::Try => "tries",
                    Verb::Acquire { with_ticket: true } => "asks, with its ticket if it has one, for",
                    Verb::Acquire { with_ticket: false } => "asks, without a ticket, for",
                    Verb::Release => "releases",
                    Verb::Leave => "leaves",
                    Verb::Draw => "draws a ticket for",
                };
                format!("{} {what} {}", who(attempt), lock(attempts[*attempt].name))
            }
            Request::Renew { what, by } => {
                let one = |one: &RenewOne| {
                    let fence = match one.fence {
                        FenceOf::Nobody => "no fence".to_owned(),
                        FenceOf::Own => "its own fence".to_owned(),
                        FenceOf::Rank(rank) => format!("fence {rank}"),
                    };
                    let name = lock(attempts[one.attempt].name);
                    let rewrite = if one.rewrite.is_some() { ", rewriting it" } else { "" };
                    let handing = one.hand_to.map_or(String::new(), |to| format!(", handing it to attempt {to}"));
                    let ttl = one.ttl.duration();
                    let check = if one.prolong { "" } else { ", only checking it" };
                    format!("attempt {} on {name} for {ttl:?}{check} with {fence}{rewrite}{handing}", one.attempt)
                };
                let all: Vec<String> = what.iter().map(one).collect();
                format!("{} renews {}", Letter(*by), all.join("; "))
            }
            Request::Release { attempt, by } => {
                let name = lock(attempts[*attempt].name);
                format!("{} releases {name} with the token of attempt {attempt}", Letter(*by))
            }
            Request::Evict { name, whom, mode, by } => {
                let how = if *mode == EvictMode::Force { "forces out of" } else { "revokes on" };
                format!("{} {how} {} {}", Letter(*by), lock(*name), who_is(attempts, *whom))
            }
            Request::Finish { name, whom, by } => {
                format!("{} asks {} to finish with {}", Letter(*by), who_is(attempts, *whom), lock(*name))
            }
        }
    }
}

fn who_is(attempts: &[Attempt], id: HolderId) -> String {
    let found = attempts.iter().position(|a| a.id == id);
    found.map_or_else(|| format!("holder {id}"), |a| format!("attempt {a}"))
}

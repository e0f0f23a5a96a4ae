//! Describes the results of a step in a form that is the same for every store.
//!
//! Fences and tickets have different numbers in each store. They are shown by their rank among all numbers of the name; each
//! new number must be higher than all before. Times are shown as the duration from which they count down. Owners, holders
//! and all other values are shown unchanged.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime};

use leasehold::Fence;
use leasehold::inspect::{Evicted, FinishRequest, Holder, Waiter};
use leasehold::lease::Token;
use leasehold::store::{Acquire, Grant, Left, Push, Release, Renewed, StoreError, Ticket, Try};
use leasehold_testkit::Kind;

use super::asking::Attempt;
use super::case::{Letter, PROVISIONAL, TTLS};

/// A reply of any operation.
#[derive(Debug)]
pub(crate) enum Answer {
    Try(Result<Try, StoreError>),
    Acquire(Result<Acquire, StoreError>),
    Release(Result<Release, StoreError>),
    Leave(Result<Left, StoreError>),
    Ticket(Result<Ticket, StoreError>),
    Renew(Vec<Renewed>),
    Evict(Result<Evicted, StoreError>),
    Finish(Result<FinishRequest, StoreError>),
}

/// A reply and its subject.
#[derive(Debug)]
pub(crate) struct Reply {
    /// `None` for operations on a name.
    pub(crate) attempt: Option<usize>,
    pub(crate) name: usize,
    pub(crate) answer: Answer,
}

/// An inspected lock.
#[derive(Debug, Default)]
pub(crate) struct View {
    pub(crate) holder: Option<Holder>,
    pub(crate) queue: Vec<Waiter>,
}

/// All results of a store.
pub(crate) struct Sight {
    pub(crate) replies: Vec<Reply>,
    pub(crate) pushes: Vec<Vec<Push>>,
    pub(crate) views: Vec<View>,
}

/// The results of a store so far.
pub(crate) struct Memory {
    kind: Kind,
    ranks: Vec<Ranks>,
    grants: HashMap<usize, LastGrant>,
    /// After the last step.
    pub(crate) views: Vec<View>,
}

/// The numbers of one name.
#[derive(Default)]
struct Ranks {
    of: HashMap<u64, usize>,
    highest: u64,
    fences: BTreeMap<usize, Fence>,
}

/// How an attempt last got the lock.
#[derive(Clone, Copy)]
struct LastGrant {
    name: usize,
    rank: usize,
    by_try: bool,
}

#[derive(Clone, Copy)]
enum Number {
    Fence(Fence),
    Ticket(Ticket),
}

impl Memory {
    pub(crate) fn new(kind: Kind, names: usize) -> Self {
        let each = |_| Ranks::default();
        let views = (0..names).map(|_| View::default()).collect();
        Self { kind, ranks: (0..names).map(each).collect(), grants: HashMap::new(), views }
    }

    /// Adds a step and describes it.
    ///
    /// # Errors
    /// If a number is not higher than those before.
    pub(crate) fn take_in(&mut self, sight: Sight, attempts: &[Attempt]) -> Result<Vec<String>, String> {
        self.follow_fresh_fences(&sight, attempts);
        let mut numbers = Vec::new();
        sight.each_number(attempts, &mut |name, number| numbers.push((name, number)));
        self.rank(numbers)?;
        self.note_grants(&sight, attempts);
        let words = Words { memory: self, attempts };
        let mut lines: Vec<String> = sight.replies.iter().map(|r| words.reply(r)).collect();
        for (client, pushes) in sight.pushes.iter().enumerate() {
            lines.extend(pushes.iter().map(|p| format!("{} is told: {}", Letter(client), words.push(p))));
        }
        for (name, view) in sight.views.iter().enumerate() {
            lines.push(format!("{} is held by {}", lock(name), words.maybe(name, view.holder.as_ref())));
            let queue: Vec<String> = view.queue.iter().map(|w| words.waiter(name, w)).collect();
            lines.push(format!("{} has in line: [{}]", lock(name), queue.join(" | ")));
        }
        self.views = sight.views;
        Ok(lines)
    }

    /// Returns whether the holder got the lock by a plain try and no renewal has written the fence yet. Until then Redis keeps no
    /// fence.
    pub(crate) fn unwritten(&self, name: usize, attempts: &[Attempt]) -> Option<usize> {
        let holder = self.views[name].holder.as_ref()?;
        if self.kind != Kind::Redis || holder.fence.is_some() || holder.foreign {
            return None;
        }
        attempts.iter().position(|a| a.id == holder.id)
    }

    /// Returns the fence of an attempt's last grant.
    pub(crate) fn granted(&self, attempt: usize) -> Option<Fence> {
        let LastGrant { name, rank, .. } = self.grants.get(&attempt)?;
        self.ranks[*name].fences.get(rank).copied()
    }

    /// Returns the ranks that are fences, of one name.
    pub(crate) fn fences(&self, name: usize) -> &BTreeMap<usize, Fence> {
        &self.ranks[name].fences
    }

    /// Gives a repeated plain try the rank of its first fence. On Redis it gets a new fence, but it is the same grant.
    fn follow_fresh_fences(&mut self, sight: &Sight, attempts: &[Attempt]) {
        for Reply { attempt, name, answer } in &sight.replies {
            let (Some(attempt), Some(fence)) = (attempt, granted(answer).and_then(|g| g.fence)) else { continue };
            let Some(LastGrant { rank, by_try: true, .. }) = self.grants.get(attempt).copied() else { continue };
            let unwritten = self.unwritten(*name, attempts) == Some(*attempt);
            let ranks = &mut self.ranks[*name];
            if unwritten && fence.get() > ranks.highest {
                ranks.highest = fence.get();
                ranks.of.insert(fence.get(), rank);
                ranks.fences.insert(rank, fence);
            }
        }
    }

    fn rank(&mut self, numbers: Vec<(usize, Number)>) -> Result<(), String> {
        let mut new: Vec<(usize, u64)> = numbers.iter().map(|(name, number)| (*name, number.get())).collect();
        new.sort_unstable();
        new.dedup();
        for (name, number) in new {
            let ranks = &mut self.ranks[name];
            if ranks.of.contains_key(&number) {
                continue;
            }
            if number <= ranks.highest {
                return Err(format!("{number} is new and not above {}, seen for {}", ranks.highest, lock(name)));
            }
            ranks.highest = number;
            let next = ranks.of.values().max().map_or(1, |r| r + 1);
            ranks.of.insert(number, next);
        }
        for (name, number) in numbers {
            if let Number::Fence(fence) = number {
                let rank = self.ranks[name].of[&fence.get()];
                self.ranks[name].fences.insert(rank, fence);
            }
        }
        Ok(())
    }

    fn note_grants(&mut self, sight: &Sight, attempts: &[Attempt]) {
        for Reply { attempt, name, answer } in &sight.replies {
            if let (Some(attempt), Some(Grant { fence: Some(fence), .. })) = (attempt, granted(answer)) {
                let rank = self.ranks[*name].of[&fence.get()];
                let known = self.grants.get(attempt).filter(|last| last.rank == rank);
                let by_try = matches!(answer, Answer::Try(_)) && known.is_none_or(|last| last.by_try);
                self.grants.insert(*attempt, LastGrant { name: *name, rank, by_try });
            }
        }
        for push in sight.pushes.iter().flatten() {
            if let Push::Granted { token, grant: Grant { fence: Some(fence), .. } } = push
                && let Some(attempt) = whose(attempts, token)
            {
                let name = attempts[attempt].name;
                let rank = self.ranks[name].of[&fence.get()];
                self.grants.insert(attempt, LastGrant { name, rank, by_try: false });
            }
        }
    }
}

impl Number {
    fn get(self) -> u64 {
        match self {
            Self::Fence(fence) => fence.get(),
            Self::Ticket(ticket) => ticket.0,
        }
    }
}

impl Sight {
    fn each_number(&self, attempts: &[Attempt], see: &mut dyn FnMut(usize, Number)) {
        for Reply { name, answer, .. } in &self.replies {
            if let Some(fence) = granted(answer).and_then(|g| g.fence) {
                see(*name, Number::Fence(fence));
            }
            match answer {
                Answer::Acquire(Ok(Acquire::Queued(place))) => see(*name, Number::Ticket(place.ticket)),
                Answer::Ticket(Ok(ticket)) => see(*name, Number::Ticket(*ticket)),
                _ => {}
            }
            if let Some(fence) = shown(answer).and_then(|h| h.fence) {
                see(*name, Number::Fence(fence));
            }
        }
        for push in self.pushes.iter().flatten() {
            if let Push::Granted { token, grant: Grant { fence: Some(fence), .. } } = push
                && let Some(attempt) = whose(attempts, token)
            {
                see(attempts[attempt].name, Number::Fence(*fence));
            }
        }
        for (name, view) in self.views.iter().enumerate() {
            if let Some(fence) = view.holder.as_ref().and_then(|h| h.fence) {
                see(name, Number::Fence(fence));
            }
            view.queue.iter().for_each(|w| see(name, Number::Ticket(w.ticket)));
        }
    }
}

pub(crate) fn granted(answer: &Answer) -> Option<&Grant> {
    match answer {
        Answer::Try(Ok(Try::Granted(grant))) | Answer::Acquire(Ok(Acquire::Granted(grant))) => Some(grant),
        _ => None,
    }
}

/// Returns the holder in a reply.
fn shown(answer: &Answer) -> Option<&Holder> {
    match answer {
        Answer::Try(Ok(Try::Held(holder))) => holder.as_ref(),
        Answer::Acquire(Ok(Acquire::Queued(place))) => place.holder.as_ref(),
        Answer::Evict(Ok(Evicted::Done(h) | Evicted::ChangedHands(h) | Evicted::Foreign(h))) => Some(h),
        Answer::Finish(Ok(
            FinishRequest::Delivered(h) | FinishRequest::Undeliverable(h) | FinishRequest::ChangedHands(h),
        )) => Some(h),
        _ => None,
    }
}

/// Returns the letter of a lock.
pub(crate) fn lock(name: usize) -> &'static str {
    ["x", "y"][name]
}

fn whose(attempts: &[Attempt], token: &Token) -> Option<usize> {
    attempts.iter().position(|a| a.claim.token == *token)
}

struct Words<'a> {
    memory: &'a Memory,
    attempts: &'a [Attempt],
}

impl Words<'_> {
    fn reply(&self, Reply { name, answer, .. }: &Reply) -> String {
        let name = *name;
        let holder = || shown(answer).map_or_else(|| "nobody".to_owned(), |h| self.holder(name, h));
        match answer {
            Answer::Try(Ok(Try::Granted(grant))) | Answer::Acquire(Ok(Acquire::Granted(grant))) => {
                format!("granted, fence {}, for {:?}", self.fence(name, grant.fence), grant.lasts)
            }
            // A try on Redis is one round trip, which does not read the time left.
            Answer::Try(Ok(Try::Held(Some(h)))) => format!("held by {}", self.holder(name, &without_end(h))),
            Answer::Try(Ok(Try::Held(None))) => "held by somebody".to_owned(),
            Answer::Try(Ok(Try::Revoked)) | Answer::Acquire(Ok(Acquire::Revoked)) => "revoked".to_owned(),
            Answer::Acquire(Ok(Acquire::Queued(place))) => {
                let ticket = self.memory.ranks[name].of[&place.ticket.0];
                format!("queued, ticket {ticket}, {} before it, behind {}", place.position, holder())
            }
            Answer::Ticket(Ok(ticket)) => format!("drew ticket {}", self.memory.ranks[name].of[&ticket.0]),
            Answer::Release(Ok(Release::Released)) => "released".to_owned(),
            Answer::Release(Ok(Release::NotOwner)) => "not the owner".to_owned(),
            Answer::Leave(Ok(Left::WasWaiting)) => "left the line".to_owned(),
            Answer::Leave(Ok(Left::WasGranted)) => "left what it was granted".to_owned(),
            Answer::Renew(answers) => {
                let words: Vec<String> = answers.iter().map(|a| format!("{a:?}").to_lowercase()).collect();
                words.join(", ")
            }
            Answer::Evict(Ok(Evicted::Done(_))) => format!("done to {}", holder()),
            Answer::Evict(Ok(Evicted::ChangedHands(_))) | Answer::Finish(Ok(FinishRequest::ChangedHands(_))) => {
                format!("not done, changed hands to {}", holder())
            }
            Answer::Evict(Ok(Evicted::Free)) | Answer::Finish(Ok(FinishRequest::Free)) => "free already".to_owned(),
            Answer::Evict(Ok(Evicted::Foreign(_))) => format!("not done, foreign: {}", holder()),
            Answer::Finish(Ok(FinishRequest::Delivered(_))) => format!("told {}", holder()),
            Answer::Finish(Ok(FinishRequest::Undeliverable(_))) => format!("deaf: {}", holder()),
            Answer::Try(Err(e))
            | Answer::Acquire(Err(e))
            | Answer::Release(Err(e))
            | Answer::Leave(Err(e))
            | Answer::Ticket(Err(e))
            | Answer::Evict(Err(e))
            | Answer::Finish(Err(e)) => format!("an error: {e}"),
        }
    }

    fn push(&self, push: &Push) -> String {
        let whom = |token: &Token| whose(self.attempts, token).map_or("a stranger".to_owned(), attempt);
        match push {
            Push::Granted { token, grant } => {
                let name = whose(self.attempts, token).map_or(0, |a| self.attempts[a].name);
                let fence = self.fence(name, grant.fence);
                format!("{} is granted, fence {fence}, for {}", whom(token), length(Some(grant.lasts)))
            }
            Push::LookAgain { token, after } => format!("{} looks again after {}", whom(token), length(Some(*after))),
            Push::Revoked { token } => format!("{} is revoked", whom(token)),
            Push::Finish { token, reason } => format!("{} is to finish: {reason}", whom(token)),
            Push::Disconnected | Push::Resync | Push::Hearing(_) => format!("{push:?}"),
        }
    }

    fn maybe(&self, name: usize, holder: Option<&Holder>) -> String {
        holder.map_or_else(|| "nobody".to_owned(), |h| self.holder(name, h))
    }

    fn holder(&self, name: usize, h: &Holder) -> String {
        let who = self.attempts.iter().position(|a| a.id == h.id);
        let last = who.and_then(|who| self.memory.grants.get(&who));
        let fence = match (h.fence, last) {
            // Redis keeps the fence of a plain try only after the first renewal.
            (None, Some(last)) if self.memory.kind == Kind::Redis && last.by_try => last.rank.to_string(),
            (fence, _) => self.fence(name, fence),
        };
        let mut text = who.map_or_else(|| h.id.to_string(), attempt);
        text += &format!(" ({}), fence {fence}, ttl {:?}, {} left", h.owner, h.ttl, length(h.ttl_left));
        for (is_so, word) in [(h.revoked, "revoked"), (h.foreign, "foreign"), (!h.listens, "does not listen")] {
            if is_so {
                text += ", ";
                text += word;
            }
        }
        if is_odd(h) {
            text += &format!(", since {} ms", h.since_ms);
        }
        text
    }

    fn waiter(&self, name: usize, w: &Waiter) -> String {
        let ticket = self.memory.ranks[name].of[&w.ticket.0];
        let listens = if w.listens { "" } else { ", polls" };
        format!("{} ticket {ticket}, since {}{listens}", w.owner.task(), w.since_ms)
    }

    fn fence(&self, name: usize, fence: Option<Fence>) -> String {
        fence.map_or_else(|| "none".to_owned(), |f| self.memory.ranks[name].of[&f.get()].to_string())
    }
}

fn attempt(number: usize) -> String {
    format!("attempt {number}")
}

fn without_end(holder: &Holder) -> Holder {
    Holder { ttl_left: None, ..holder.clone() }
}

/// Returns the duration from which a time counts down.
fn length(left: Option<Duration>) -> String {
    let Some(left) = left else { return "no end".to_owned() };
    let whole = [PROVISIONAL].iter().chain(&TTLS).find(|whole| left <= **whole);
    whole.map_or_else(|| format!("{left:?}, too much"), |whole| format!("{whole:?}"))
}

/// Checks a wall-clock time; the start of a foreign holder is unknown.
fn is_odd(holder: &Holder) -> bool {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_millis();
    let distance = now.abs_diff(u128::from(holder.since_ms));
    if holder.foreign { holder.since_ms != 0 } else { distance > 60_000 }
}

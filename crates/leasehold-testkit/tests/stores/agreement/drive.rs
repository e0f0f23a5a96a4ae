//! Runs a sequence on every store at once, and compares after each step.
//!
//! Some differences are by design and are avoided here:
//!
//! - Only SQLite notices the death of a process and ends its leases. In the other stores leases expire, so a death ends them
//!   here.
//! - On Redis the value has the fence of a plain try only after a renewal. If the try is sent again, it gets a new fence and
//!   yields to requests that came meanwhile; a renewal with another attempt's fence would be believed; and a lease that is
//!   handed on without its fence would never have one. No client sends any of these: [`Drive::leave_out`].
//! - An unfenced try on Redis does not see the queue. It may overtake it, and its release serves no waiter until the head of
//!   the queue sends its next request, which it does at once here.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::inspect::HolderId;
use leasehold::lease::Ttl;
use leasehold::store::{Acquire, Grant, Push, Renewal, Ticket};
use leasehold::{Fence, LockName, Owner};
use leasehold_testkit::Kind;

use super::asking::{Attempt, FenceOf, RenewOne, Request};
use super::case::{Case, FOREIGN, Fate, FenceSpec, Letter, RenewSpec, Step, TTLS, Verb, Whom};
use super::seen::{Answer, Memory, Reply, Sight, View, granted, lock};
use super::worlds::World;

/// A case that takes longer is not judged: a polling waiter that sends nothing for three seconds loses its turn, and the stores
/// notice that at different times.
const TOO_LONG: Duration = Duration::from_millis(2_500);

/// Why a case was stopped early.
pub(crate) enum Stop {
    /// The machine was too slow.
    Slow,
    Disagreement(String),
}

/// What a client knows about an attempt, with the numbers of one store.
#[derive(Default, Clone, Copy)]
struct Known {
    ticket: Option<Ticket>,
    fence: Option<Fence>,
}

/// A running sequence.
pub(crate) struct Drive<'a> {
    worlds: &'a mut [World],
    case: &'a Case,
    names: Vec<LockName>,
    attempts: Vec<Attempt>,
    /// The current attempt of a claim.
    current: Vec<usize>,
    dead: HashSet<usize>,
    known: Vec<HashMap<usize, Known>>,
    memories: Vec<Memory>,
    unanswered: VecDeque<Request>,
    log: Vec<String>,
    began: Instant,
}

impl<'a> Drive<'a> {
    /// Runs a case.
    pub(crate) async fn run(worlds: &'a mut [World], case: &'a Case) -> Result<(), Stop> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = |text: String| LockName::new(text).expect("a name");
        for world in worlds.iter_mut() {
            world.begin(case.clients).await;
        }
        let mut drive = Self {
            names: vec![name(format!("case-{number}")), name(format!("gpu_lock:{number}"))],
            attempts: Vec::new(),
            current: vec![0; case.claims.len()],
            dead: HashSet::new(),
            known: worlds.iter().map(|_| HashMap::new()).collect(),
            memories: worlds.iter().map(|w| Memory::new(w.kind(), case.names)).collect(),
            unanswered: VecDeque::new(),
            log: Vec::new(),
            began: Instant::now(),
            worlds,
            case,
        };
        drive.names.truncate(case.names);
        (0..case.clients).for_each(|client| drive.make_attempts(client));
        for step in &case.steps {
            if drive.began.elapsed() > TOO_LONG {
                return Err(Stop::Slow);
            }
            drive.step(step).await?;
        }
        drive.log.push("one after the other leaves".to_owned());
        for attempt in drive.current.clone() {
            if drive.is_living(attempt) {
                drive.exchange(&[Request::Ask { verb: Verb::Leave, attempt }], true).await?;
            }
        }
        Ok(())
    }

    async fn step(&mut self, step: &Step) -> Result<(), Stop> {
        match step {
            Step::Ask { verb, claim, fate } => {
                let attempt = self.attempt(*claim).await;
                self.ask(Request::Ask { verb: *verb, attempt }, *fate).await
            }
            Step::Renew { what, fate } => {
                let request = self.renewal(what).await;
                self.ask(request, *fate).await
            }
            Step::Release { claim, dead, by } => {
                let (attempt, by) = (self.token(*claim, *dead), self.client(*by).await);
                self.ask(Request::Release { attempt, by }, Fate::Answered).await
            }
            Step::Resend => {
                let Some(request) = self.unanswered.pop_front() else { return Ok(()) };
                self.ask(request, Fate::Answered).await
            }
            Step::Evict { name, whom, mode, by } => {
                let (name, by) = (name % self.names.len(), self.client(*by).await);
                let whom = self.whom(name, *whom);
                self.ask(Request::Evict { name, whom, mode: *mode, by }, Fate::Answered).await
            }
            Step::Finish { name, whom, by } => {
                let (name, by) = (name % self.names.len(), self.client(*by).await);
                let whom = self.whom(name, *whom);
                self.ask(Request::Finish { name, whom, by }, Fate::Answered).await
            }
            Step::Expire { name } => {
                let name = name % self.names.len();
                self.log.push(format!("the lease on {} ends", lock(name)));
                for world in &*self.worlds {
                    world.expire(&self.names[name]).await;
                }
                self.exchange(&[], true).await
            }
            Step::Die { client, politely } => {
                let client = client % self.case.clients;
                if self.dead.contains(&client) {
                    return Ok(());
                }
                let how = if *politely { "closes" } else { "dies" };
                self.log.push(format!("{} {how}", Letter(client)));
                self.die(client, *politely).await
            }
            Step::Crowd { name, many } => self.crowd(name % self.names.len(), *many).await,
            Step::Foreign { name, value } => {
                let name = name % self.names.len();
                self.log.push(format!("another kind of client writes `{}` to {}", FOREIGN[*value], lock(name)));
                for world in &*self.worlds {
                    world.put_foreign(&self.names[name], FOREIGN[*value], TTLS[0]).await;
                }
                self.exchange(&[], true).await
            }
        }
    }

    /// Sends a request to every store, unless no client would send it.
    async fn ask(&mut self, request: Request, fate: Fate) -> Result<(), Stop> {
        for again in [false, true] {
            if again && fate != Fate::Twice {
                break;
            }
            let mut all = vec![request.clone()];
            let mut text = request.words(&self.attempts);
            if let Some(why) = self.leave_out(&request) {
                self.log.push(format!("{text}: left out, {why}"));
                return Ok(());
            }
            if let Some(overtaken) = self.overtaken(&request) {
                let Some(head) = overtaken else {
                    self.log.push(format!("{text}: left out, everybody it overtakes is dead"));
                    return Ok(());
                };
                all.push(Request::Ask { verb: Verb::Acquire { with_ticket: true }, attempt: head });
                write!(text, ", and attempt {head}, whom it overtakes, asks again").expect("text");
            }
            text += match (fate, again) {
                (Fate::Lost, _) => ", and never hears the answer",
                (_, true) => ", the same again",
                _ => "",
            };
            self.log.push(text);
            self.exchange(&all, fate != Fate::Lost).await?;
        }
        if fate == Fate::Lost {
            self.unanswered.push_back(request);
        }
        Ok(())
    }

    /// Returns why no client would send this request now.
    fn leave_out(&self, request: &Request) -> Option<&'static str> {
        match request {
            Request::Ask { verb: Verb::Try, attempt } => {
                let Attempt { name, claim, .. } = &self.attempts[*attempt];
                let somebody_waits = !self.memories[0].views[*name].queue.is_empty();
                (claim.fenced && somebody_waits && self.unwritten(*attempt).is_some())
                    .then_some("it was answered and somebody has come since")
            }
            Request::Renew { what, .. } => {
                let strange = |one: &RenewOne| {
                    // A repeated hand-on has the fence that the first one has written.
                    if one.hand_to.is_some_and(|to| to != one.attempt && self.unwritten(to).is_some()) {
                        return true;
                    }
                    let Some(world) = self.unwritten(one.attempt) else { return false };
                    let granted = self.memories[world].granted(one.attempt);
                    match self.fence(world, one) {
                        Some(fence) => granted.is_some_and(|own| own != fence),
                        None => one.hand_to.is_some(),
                    }
                };
                what.iter().any(strange).then_some("it was granted anew since with a try, or is handed on unfenced")
            }
            _ => None,
        }
    }

    /// Returns the store in which an attempt holds its lock by a plain try whose fence is not written yet.
    fn unwritten(&self, attempt: usize) -> Option<usize> {
        let name = self.attempts[attempt].name;
        self.memories.iter().position(|m| m.unwritten(name, &self.attempts) == Some(attempt))
    }

    /// Returns the waiter that an unfenced try overtakes: the first living one in the queue.
    fn overtaken(&self, request: &Request) -> Option<Option<usize>> {
        let Request::Ask { verb: Verb::Try, attempt } = request else { return None };
        let Attempt { name, claim, .. } = &self.attempts[*attempt];
        let View { holder, queue } = &self.memories[0].views[*name];
        if claim.fenced || holder.is_some() || queue.is_empty() {
            return None;
        }
        let waiting = queue.iter().filter_map(|w| self.attempts.iter().position(|a| a.claim.owner == w.owner));
        Some(waiting.into_iter().find(|w| w != attempt && self.is_living(*w)))
    }

    /// Kills a process. In stores that do not notice this, its leases expire.
    async fn die(&mut self, client: usize, politely: bool) -> Result<(), Stop> {
        self.dead.insert(client);
        for name in 0..self.names.len() {
            let holder = self.memories[0].views[name].holder.as_ref();
            let Some(holder) = holder.filter(|h| h.listens) else { continue };
            if self.attempts.iter().any(|a| a.id == holder.id && a.client == client) {
                for world in self.worlds.iter().filter(|w| w.kind() != Kind::Sqlite) {
                    world.expire(&self.names[name]).await;
                }
            }
        }
        for world in &mut *self.worlds {
            world.kill(client, politely).await;
        }
        // No process is left to send them again.
        let attempts = &self.attempts;
        self.unanswered.retain(|request| match request {
            Request::Ask { attempt, .. } => attempts[*attempt].client != client,
            Request::Renew { by, .. }
            | Request::Release { by, .. }
            | Request::Evict { by, .. }
            | Request::Finish { by, .. } => *by != client,
        });
        self.exchange(&[], true).await
    }

    /// Starts a process that waits many times, and kills it.
    async fn crowd(&mut self, name: usize, many: usize) -> Result<(), Stop> {
        let client = self.case.clients;
        for world in &mut *self.worlds {
            world.revive(client).await;
        }
        self.dead.remove(&client);
        let first = self.attempts.len();
        for _ in 0..many {
            let attempt = Attempt::new(client, name, self.names[name].clone(), self.attempts.len());
            self.attempts.push(attempt);
        }
        self.log.push(format!("{many} attempts of another process ask for {}", lock(name)));
        let acquire = |attempt| Request::Ask { verb: Verb::Acquire { with_ticket: false }, attempt };
        self.exchange(&(first..first + many).map(acquire).collect::<Vec<_>>(), true).await?;
        self.log.push("their process dies".to_owned());
        self.die(client, false).await
    }

    /// Sends requests to every store and compares the results.
    async fn exchange(&mut self, requests: &[Request], learn: bool) -> Result<(), Stop> {
        let mut shown = Vec::new();
        // Before any reply, because what a client forgets does not depend on the store.
        let unwritten: HashSet<usize> = (0..self.attempts.len()).filter(|a| self.unwritten(*a).is_some()).collect();
        for world in 0..self.worlds.len() {
            let mut replies = Vec::new();
            for request in requests {
                replies.push(self.send(world, request).await);
            }
            let pushes = self.worlds[world].told().await;
            let mut views = Vec::new();
            for name in &self.names {
                let onlooker = &self.worlds[world].onlooker;
                let holder = onlooker.holder(name).await.expect("a look at the holder");
                views.push(View { holder, queue: onlooker.queue(name).await.expect("a look at the queue") });
            }
            let sight = Sight { replies, pushes, views };
            self.learn(world, &sight, learn, &unwritten);
            shown.push(self.memories[world].take_in(sight, &self.attempts));
        }
        self.compare(shown)
    }

    async fn send(&self, world: usize, request: &Request) -> Reply {
        let store = |client: usize| {
            let client = self.worlds[world].clients[client].as_ref();
            client.expect("a living client").store.clone()
        };
        let known = |attempt: usize| self.known[world].get(&attempt).copied().unwrap_or_default();
        match request {
            Request::Ask { verb, attempt } => {
                let Attempt { client, name, claim, .. } = &self.attempts[*attempt];
                let store = store(*client);
                let answer = match verb {
                    Verb::Try => Answer::Try(store.try_acquire(claim).await),
                    Verb::Acquire { with_ticket } => {
                        let ticket = known(*attempt).ticket.filter(|_| *with_ticket);
                        Answer::Acquire(store.acquire(claim, ticket).await)
                    }
                    Verb::Release => Answer::Release(store.release(&claim.name, &claim.token).await),
                    Verb::Leave => Answer::Leave(store.leave(claim).await),
                    Verb::Draw => Answer::Ticket(store.ticket().await),
                };
                Reply { attempt: Some(*attempt), name: *name, answer }
            }
            Request::Renew { what, by } => {
                let renewal = |one: &RenewOne| {
                    let (claim, fence) = (&self.attempts[one.attempt].claim, self.fence(world, one));
                    let (name, token) = (claim.name.clone(), claim.token.clone());
                    let hand_to = one.hand_to.map(|to| self.attempts[to].claim.token.clone());
                    let (ttl, prolong, rewrite) = (one.ttl, one.prolong, one.rewrite.clone());
                    Renewal { name, token, fence, ttl, prolong, rewrite, hand_to }
                };
                let renewals: Vec<Renewal> = what.iter().map(renewal).collect();
                Reply { attempt: None, name: 0, answer: Answer::Renew(store(*by).renew(&renewals).await) }
            }
            Request::Release { attempt, by } => {
                let Attempt { name, claim, .. } = &self.attempts[*attempt];
                let answer = Answer::Release(store(*by).release(&claim.name, &claim.token).await);
                Reply { attempt: None, name: *name, answer }
            }
            Request::Evict { name, whom, mode, by } => {
                let answer = store(*by).evict(&self.names[*name], *whom, *mode).await;
                Reply { attempt: None, name: *name, answer: Answer::Evict(answer) }
            }
            Request::Finish { name, whom, by } => {
                let answer = store(*by).ask_to_finish(&self.names[*name], *whom, "a new release, at once").await;
                Reply { attempt: None, name: *name, answer: Answer::Finish(answer) }
            }
        }
    }

    /// Updates what the clients know.
    fn learn(&mut self, world: usize, sight: &Sight, answered: bool, unwritten: &HashSet<usize>) {
        for Reply { attempt, answer, .. } in &sight.replies {
            let Some(attempt) = attempt else { continue };
            let known = self.known[world].entry(*attempt).or_default();
            match granted(answer) {
                Some(Grant { fence, .. }) if answered => known.fence = *fence,
                // A client that repeats a plain try forgets the first reply.
                Some(_) if unwritten.contains(attempt) => known.fence = None,
                _ => {}
            }
            match answer {
                Answer::Acquire(Ok(Acquire::Queued(place))) if answered => known.ticket = Some(place.ticket),
                Answer::Ticket(Ok(ticket)) if answered => known.ticket = Some(*ticket),
                _ => {}
            }
        }
        for push in sight.pushes.iter().flatten() {
            if let Push::Granted { token, grant } = push
                && let Some(attempt) = self.attempts.iter().position(|a| a.claim.token == *token)
            {
                self.known[world].entry(attempt).or_default().fence = grant.fence;
            }
        }
    }

    fn compare(&self, shown: Vec<Result<Vec<String>, String>>) -> Result<(), Stop> {
        if shown.iter().all(Result::is_ok) && shown.iter().all(|s| *s == shown[0]) {
            return Ok(());
        }
        if self.began.elapsed() > TOO_LONG {
            return Err(Stop::Slow);
        }
        let mut text = format!("the stores disagree at step {}.\n\n{}", self.log.len(), self.story());
        for (world, shown) in self.worlds.iter().zip(&shown) {
            write!(text, "\n{:?} shows\n", world.kind()).expect("text");
            match shown {
                Ok(lines) => lines.iter().for_each(|line| writeln!(text, "  {line}").expect("text")),
                Err(wrong) => writeln!(text, "  {wrong}").expect("text"),
            }
        }
        Err(Stop::Disagreement(text))
    }

    /// Returns the steps so far.
    fn story(&self) -> String {
        let mut text = String::new();
        for (number, Attempt { client, name, claim, .. }) in self.attempts.iter().enumerate() {
            // The attempts of a crowd are all alike.
            if *client < self.case.clients {
                let unfenced = if claim.fenced { "" } else { ", unfenced" };
                let deaf = if claim.listens { "" } else { ", does not listen" };
                let (client, name, ttl) = (Letter(*client), lock(*name), claim.ttl.duration());
                writeln!(text, "attempt {number}: {client} wants {name} for {ttl:?}{unfenced}{deaf}").expect("text");
            }
        }
        for (number, line) in self.log.iter().enumerate() {
            writeln!(text, "{:>3}. {line}", number + 1).expect("text");
        }
        text
    }

    fn whom(&self, name: usize, whom: Whom) -> HolderId {
        let unknown = HolderId::parse("0123456789ab").expect("an id");
        match whom {
            Whom::Current => self.memories[0].views[name].holder.as_ref().map_or(unknown, |h| h.id),
            Whom::Claim(claim) => self.attempts[claim % self.attempts.len()].id,
            Whom::Unknown => unknown,
        }
    }

    async fn renewal(&mut self, what: &[RenewSpec]) -> Request {
        let by = self.attempt(what[0].claim).await;
        let by = self.attempts[by].client;
        let one = |spec: &RenewSpec| {
            let attempt = self.token(spec.claim, spec.dead);
            let ttl = Ttl::new(TTLS[spec.ttl]).expect("a ttl");
            let rewrite = spec.rewrite.then(|| Owner::named(format!("{attempt}, renewed")).expect("an owner"));
            // One for the same lock; it may hold the lock, wait for it, or not have sent a request.
            let same_name = |other: &usize| self.attempts[*other].name == self.attempts[attempt].name;
            let hand_to = spec.hand_to.map(|claim| self.token(claim, false)).filter(same_name);
            let (fence, prolong) = (self.choose(attempt, spec.fence), spec.prolong);
            RenewOne { attempt, fence, ttl, prolong, rewrite, hand_to }
        };
        Request::Renew { what: what.iter().map(one).collect(), by }
    }

    /// Returns the attempt whose token is used: the current one of a claim, or one whose process has died.
    fn token(&self, claim: usize, dead: bool) -> usize {
        let dead: Vec<usize> = (0..self.attempts.len()).filter(|a| dead && !self.is_living(*a)).collect();
        let number = claim % dead.len().max(1);
        dead.get(number).copied().unwrap_or_else(|| self.current[claim % self.current.len()])
    }

    /// Returns the fence of a renewal, in the numbers of one store.
    fn fence(&self, world: usize, one: &RenewOne) -> Option<Fence> {
        match one.fence {
            FenceOf::Nobody => None,
            FenceOf::Own => self.known[world].get(&one.attempt).and_then(|known| known.fence),
            FenceOf::Rank(rank) => self.memories[world].fences(self.attempts[one.attempt].name).get(&rank).copied(),
        }
    }

    fn choose(&self, attempt: usize, spec: FenceSpec) -> FenceOf {
        let name = self.attempts[attempt].name;
        match spec {
            FenceSpec::None => FenceOf::Nobody,
            FenceSpec::Own => FenceOf::Own,
            FenceSpec::Other(number) => {
                let known = |rank: &&usize| self.memories.iter().all(|m| m.fences(name).contains_key(rank));
                let ranks: Vec<usize> = self.memories[0].fences(name).keys().filter(known).copied().collect();
                ranks.get(number % ranks.len().max(1)).map_or(FenceOf::Nobody, |rank| FenceOf::Rank(*rank))
            }
        }
    }

    /// Returns the attempt of a claim, and starts its client if it is dead.
    async fn attempt(&mut self, claim: usize) -> usize {
        let claim = claim % self.current.len();
        self.client(self.case.claims[claim].client).await;
        self.current[claim]
    }

    async fn client(&mut self, client: usize) -> usize {
        let client = client % self.case.clients;
        if self.dead.remove(&client) {
            for world in &mut *self.worlds {
                world.revive(client).await;
            }
            let first = self.attempts.len();
            self.make_attempts(client);
            self.log.push(format!("{} is started again, and has attempts {first} and up", Letter(client)));
        }
        client
    }

    fn is_living(&self, attempt: usize) -> bool {
        self.current.contains(&attempt) && !self.dead.contains(&self.attempts[attempt].client)
    }

    fn make_attempts(&mut self, client: usize) {
        for (number, spec) in self.case.claims.iter().enumerate() {
            if spec.client % self.case.clients != client {
                continue;
            }
            let name = spec.name % self.case.names;
            let mut attempt = Attempt::new(client, name, self.names[name].clone(), self.attempts.len());
            attempt.claim.ttl = Ttl::new(TTLS[spec.ttl]).expect("a ttl");
            attempt.claim.fenced = spec.fenced;
            attempt.claim.listens = spec.listens;
            self.current[number] = self.attempts.len();
            self.attempts.push(attempt);
        }
    }
}

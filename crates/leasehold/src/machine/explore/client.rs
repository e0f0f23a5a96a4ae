//! One client of a small world: the production code of `crate::client` and of a try on Redis, and what is on its way.

use super::message::{Answer, Request, Says, Verb};
use super::world::{NOW, OLD, Setup, TICK};
use crate::client::leaving::PendingLeave;
use crate::client::renewal::{LeaseState, Sent};
use crate::client::retry::Retry;
use crate::client::rooms::{Rooms, SeatId};
use crate::client::trying::Trying;
use crate::client::visit::Visit;
use crate::clock::Moment;
use crate::facts::{Fence, Token};
use crate::rules::Rule;
use crate::store::redis::try_steps::TrySteps;

#[derive(Clone)]
pub(super) struct Client {
    pub(super) alive: bool,
    pub(super) up: bool,
    /// How often it has wanted the lock.
    pub(super) attempts: u8,
    pub(super) user: User,
    pub(super) rooms: Rooms<()>,
    /// Tokens given up, until that is confirmed.
    pub(super) closing: Vec<Closing>,
    /// Tokens that leases were handed on to, where the client does not know whether they were.
    pub(super) handed_on: Vec<Token>,
    pub(super) requests: Vec<Request>,
    /// Requests that wait for a connection.
    pub(super) unsent: Vec<Request>,
    pub(super) answers: Vec<Answer>,
    /// Commands on a connection that the client has lost and the server has not: they may still run.
    pub(super) old: Option<Vec<Request>>,
    /// The last token that was granted the lock (only where order is looked at): if its client was too slow, it may wait
    /// again under its old ticket.
    pub(super) served: Option<Token>,
    /// What the moment of a pushed grant is read from.
    pub(super) stamp: Moment,
    /// When the newest command was sent (only where a rule is removed).
    pub(super) newest_sent: Moment,
    pub(super) tokens_used: usize,
}

/// What the client's task is doing.
#[derive(Clone)]
pub(super) enum User {
    Idle,
    Trying { token: Token, trying: Trying, steps: TrySteps },
    Waiting(SeatId),
    Holding(Lease),
    HandingOn { lease: Lease, to: Token, retry: Retry },
}

#[derive(Clone)]
pub(super) struct Lease {
    pub(super) token: Token,
    pub(super) fence: Fence,
    pub(super) state: LeaseState,
    /// What the renewal or check in flight has sent.
    pub(super) sent: Option<Sent>,
    /// The belief has ended before.
    pub(super) was_over: bool,
    /// It was handed on to this token.
    pub(super) is_handed_on: bool,
}

#[derive(Clone)]
pub(super) struct Closing {
    pub(super) token: Token,
    pub(super) how: HowClosed,
    /// A request is in flight, or waits for a connection.
    pub(super) asking: bool,
}

#[derive(Clone)]
pub(super) enum HowClosed {
    Leave(PendingLeave),
    /// With the lease, where its belief can make a difference yet.
    Release(Option<Box<Lease>>),
}

impl Client {
    pub(super) fn new() -> Self {
        Self {
            alive: true,
            up: true,
            attempts: 0,
            user: User::Idle,
            rooms: Rooms::default(),
            closing: Vec::new(),
            handed_on: Vec::new(),
            requests: Vec::new(),
            unsent: Vec::new(),
            answers: Vec::new(),
            old: None,
            served: None,
            stamp: OLD,
            newest_sent: OLD,
            tokens_used: 0,
        }
    }

    /// Whether the server still has a connection that listens for this client.
    pub(super) fn is_heard(&self) -> bool {
        self.up || self.old.is_some()
    }

    pub(super) fn is_idle(&self) -> bool {
        matches!(self.user, User::Idle)
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.user, User::Waiting(_))
    }

    pub(super) fn holding(&self) -> Option<&Lease> {
        if let User::Holding(lease) = &self.user { Some(lease) } else { None }
    }

    /// Returns the lease that this client holds and those that it is releasing.
    pub(super) fn leases(&self) -> impl Iterator<Item = &Lease> {
        let released = self.closing.iter().filter_map(|closing| match &closing.how {
            HowClosed::Release(lease) => lease.as_deref(),
            HowClosed::Leave(_) => None,
        });
        self.holding().into_iter().chain(released)
    }

    /// Whether the client still has to do with a token.
    pub(super) fn uses(&self, token: &Token) -> bool {
        let user = match &self.user {
            User::Idle | User::Waiting(_) => false,
            User::Trying { token: mine, .. } => mine == token,
            User::Holding(lease) => lease.token == *token,
            User::HandingOn { lease, to, .. } => lease.token == *token || to == token,
        };
        user || self.rooms.knows(token)
            || self.closing.iter().any(|closing| closing.token == *token)
            || self.handed_on.contains(token)
    }

    /// Whether a command on its way mentions a token.
    pub(super) fn mentions(&self, token: &Token) -> bool {
        let requests = self.requests.iter().chain(&self.unsent).chain(self.old.iter().flatten());
        requests
            .into_iter()
            .any(|request| request.token == *token || matches!(&request.verb, Verb::HandOn { to, .. } if to == token))
    }

    /// Forgets what can make no difference any more.
    pub(super) fn tidy(&mut self, setup: &Setup) {
        if !self.alive {
            *self = Self { alive: false, up: false, old: self.old.take(), ..Self::new() };
            return;
        }
        let waiting = self.is_waiting();
        if !waiting {
            let mut answers = std::mem::take(&mut self.answers);
            answers.retain(|answer| self.needs(answer));
            self.answers = answers;
            self.stamp = OLD;
            self.newest_sent = OLD;
        }
        if self.stamp.until(NOW) >= TICK * u32::from(setup.provisional) {
            self.stamp = OLD;
        }
        if let User::Holding(lease) = &mut self.user {
            lease.tidy(setup);
        }
        for closing in &mut self.closing {
            let HowClosed::Release(lease) = &mut closing.how else { continue };
            lease.iter_mut().for_each(|lease| lease.tidy(setup));
            if Rule::EndedBeliefStaysEnded.applies() {
                *lease = lease.take().filter(|lease| !lease.was_over);
            }
        }
    }

    /// Whether an answer makes a difference besides the moment it proves for pushes.
    fn needs(&self, answer: &Answer) -> bool {
        let token = &answer.token;
        match &answer.says {
            Says::TrySet { .. } | Says::TryRead(_) | Says::TryRenewed(_) | Says::Yielded(_) => {
                matches!(&self.user, User::Trying { token: mine, .. } if mine == token)
            }
            Says::Acquired(..) => self.rooms.waits(token),
            Says::Renewed(_) => {
                let late = !Rule::EndedBeliefStaysEnded.applies();
                self.holding().is_some_and(|lease| lease.token == *token)
                    || (late && self.leases().any(|lease| lease.token == *token))
            }
            Says::HandedOn(_) => matches!(&self.user, User::HandingOn { lease, .. } if lease.token == *token),
            Says::Probed => false,
            Says::Closed(_) => self.closing.iter().any(|closing| closing.token == *token),
            Says::PushGranted { .. } => self.rooms.knows(token),
            Says::PushRevoked => self.holding().is_some_and(|lease| lease.token == *token),
        }
    }

    pub(super) fn visit(&mut self, visit: &mut dyn Visit) {
        visit.flag(self.alive);
        visit.flag(self.up);
        visit.count(usize::from(self.attempts));
        match &mut self.user {
            User::Idle => visit.count(0),
            User::Trying { token, steps, .. } => {
                visit.count(1);
                visit.token(token);
                steps.visit(visit);
            }
            User::Waiting(_) => visit.count(2),
            User::Holding(lease) => {
                visit.count(3);
                lease.visit(visit);
            }
            User::HandingOn { lease, to, .. } => {
                visit.count(4);
                lease.visit(visit);
                visit.token(to);
            }
        }
        self.rooms.visit(visit);
        visit.count(self.closing.len());
        for Closing { token, how, asking } in &mut self.closing {
            visit.token(token);
            visit.flag(*asking);
            match how {
                HowClosed::Leave(leaving) => {
                    visit.count(0);
                    leaving.visit(visit);
                }
                HowClosed::Release(lease) => {
                    visit.count(1 + usize::from(lease.is_some()));
                    lease.iter_mut().for_each(|lease| lease.visit(visit));
                }
            }
        }
        visit.count(self.handed_on.len());
        self.handed_on.iter_mut().for_each(|token| visit.token(token));
        for requests in [&mut self.requests, &mut self.unsent] {
            visit.count(requests.len());
            requests.iter_mut().for_each(|request| request.visit(visit));
        }
        visit.count(self.answers.len());
        self.answers.iter_mut().for_each(|answer| answer.visit(visit));
        visit.flag(self.old.is_some());
        visit.count(self.old.as_ref().map_or(0, Vec::len));
        self.old.iter_mut().flatten().for_each(|request| request.visit(visit));
        visit.flag(self.served.is_some());
        self.served.iter_mut().for_each(|token| visit.token(token));
        visit.start(&mut self.stamp);
        visit.start(&mut self.newest_sent);
    }
}

impl Lease {
    fn tidy(&mut self, setup: &Setup) {
        self.was_over |= !self.state.belief.is_valid(NOW);
        if !setup.liveness {
            // Whether the record in the store is complete makes no difference to anything else.
            self.state.rewrite = false;
            self.sent.iter_mut().for_each(|sent| sent.rewrote = None);
        }
    }

    /// Whether the holder believes in it again after it had ended.
    pub(super) fn is_revived(&self) -> bool {
        self.was_over && self.state.belief.is_valid(NOW)
    }

    fn visit(&mut self, visit: &mut dyn Visit) {
        visit.token(&mut self.token);
        let mut fence = Some(self.fence);
        visit.fence(&mut fence);
        self.fence = fence.expect("it stays one");
        self.state.visit(visit);
        visit.flag(self.was_over);
        visit.flag(self.is_handed_on);
        visit.flag(self.sent.as_ref().is_some_and(|sent| sent.prolong));
        visit.flag(self.sent.as_ref().is_some_and(|sent| sent.rewrote.is_some()));
    }
}

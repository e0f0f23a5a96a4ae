//! A request for one or more members of a pool, which are ordinary locks.
//!
//! What is free is taken by tries. A request that has to wait draws a ticket and waits in the rooms of all members under
//! it, so that the queues of all members have one order. The first rooms that are granted their lock serve the request.
//!
//! A request for several must never hold a part while another one holds the rest. So such requests collect one at a
//! time, under a lock of the pool's own, the *collector lock*, which they ask for with the same ticket. Requests for one
//! hold nothing while they wait, and need no such lock. Nor does a request for several that takes what is free at once,
//! or releases it.

use std::collections::BTreeSet;

use crate::store::Ticket;

/// A request in progress. Members are named by their place among the pool's members.
#[derive(Debug, Clone)]
pub(crate) struct PoolCall {
    wanted: usize,
    members: usize,
    may_wait: bool,
    ticket: Option<Ticket>,
    /// Whether the request holds the collector lock.
    collects: bool,
    taken: BTreeSet<usize>,
    /// Members that were tried, or cannot be, since the last look.
    tried: BTreeSet<usize>,
    step: PoolStep,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PoolStep {
    Start,
    TryingCollectorLock,
    /// Takes what is free without the collector lock: all of it, or nothing.
    LookingForAll,
    AskingForWaiters {
        free: Vec<usize>,
    },
    TakingAll {
        free: Vec<usize>,
    },
    WaitingForCollectorLock,
    /// Takes what is free, as a first part.
    TakingFirst,
    LookingForRest,
    TakingRest {
        free: Vec<usize>,
    },
    WaitingForRest,
}

/// What to do next. The answer is the next [`Event`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Do {
    /// Try the collector lock. `draw`: and draw a ticket at the same time, so that a request that has to wait is as old
    /// as its first question.
    TryCollectorLock { draw: bool },
    /// Look which members are free.
    Look,
    /// Look whether others wait for the collector lock.
    LookForWaiters,
    /// Try these members at the same time.
    Try(Vec<usize>),
    /// Draw a ticket.
    Draw,
    /// Release every member that was acquired, then call [`PoolCall::given_back`].
    GiveBack,
    /// Wait for the collector lock under this ticket.
    WaitForCollectorLock(Ticket),
    /// Wait under this ticket in the rooms of all members that are not taken, until enough are. A member that is lost
    /// meanwhile is waited for again.
    WaitForRest(Ticket),
    /// Enough are taken. `waited`: others handed them over.
    Done { waited: bool },
    /// Nothing can be done without waiting, and the request does not wait.
    Late,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The collector lock was tried; and the ticket, where one was drawn.
    CollectorLockTried {
        granted: bool,
        ticket: Option<Ticket>,
    },
    CollectorLockGranted,
    /// A ticket was drawn.
    Drew(Ticket),
    /// These members are free.
    Free(Vec<usize>),
    /// Whether others wait for the collector lock.
    OthersWait(bool),
    /// These of the members that were tried are ours.
    Took(Vec<usize>),
    /// Enough members are taken.
    Complete,
    /// The collector lock was lost while waiting for the rest.
    CollectorLockLost,
}

impl PoolCall {
    pub(crate) fn new(wanted: usize, members: usize, may_wait: bool) -> Self {
        Self {
            wanted,
            members,
            may_wait,
            ticket: None,
            collects: false,
            taken: BTreeSet::new(),
            tried: BTreeSet::new(),
            step: PoolStep::Start,
        }
    }

    /// The first thing to do. `may_try` says whether a member may be tried: a request that can wait does not overtake
    /// tasks of its own process that wait for it already.
    pub(crate) fn begin(&mut self, may_try: &dyn Fn(usize) -> bool) -> Do {
        if self.wanted == 1 {
            return self.take_first(may_try);
        }
        self.step = PoolStep::TryingCollectorLock;
        Do::TryCollectorLock { draw: self.may_wait && self.ticket.is_none() }
    }

    /// What to do after an event.
    pub(crate) fn next(&mut self, event: Event, may_try: &dyn Fn(usize) -> bool) -> Do {
        match (std::mem::replace(&mut self.step, PoolStep::Start), event) {
            (PoolStep::TryingCollectorLock, Event::CollectorLockTried { granted, ticket }) => {
                self.ticket = self.ticket.or(ticket);
                self.collects = granted;
                if granted {
                    return self.take_first(may_try);
                }
                // Another request collects. It may want other members, or be about to finish.
                self.step = PoolStep::LookingForAll;
                Do::Look
            }
            (PoolStep::LookingForAll, Event::Free(free)) if free.len() >= self.wanted => {
                if !self.may_wait {
                    return self.take_all(free, may_try);
                }
                self.step = PoolStep::AskingForWaiters { free };
                Do::LookForWaiters
            }
            (PoolStep::AskingForWaiters { free }, Event::OthersWait(false)) => self.take_all(free, may_try),
            (PoolStep::TakingAll { free }, Event::Took(took)) => {
                self.taken.extend(took);
                self.take_all(free, may_try)
            }
            (PoolStep::LookingForAll | PoolStep::AskingForWaiters { .. }, _) => self.wait_for_collector_lock(),
            (PoolStep::WaitingForCollectorLock, Event::Drew(ticket)) => {
                self.ticket = Some(ticket);
                self.wait_for_collector_lock()
            }
            // A request that has waited for the collector lock is older than others that wait for the members. A try
            // would pass a free member to the first of them; its ticket puts it before them.
            (PoolStep::WaitingForCollectorLock, _) => {
                self.collects = true;
                self.wait_for_rest()
            }
            (PoolStep::TakingFirst, Event::Took(took)) => {
                self.taken.extend(took);
                if self.is_complete() {
                    return Do::Done { waited: false };
                }
                self.step = PoolStep::LookingForRest;
                Do::Look
            }
            (PoolStep::LookingForRest, Event::Free(free)) => self.take_rest(free, may_try),
            (PoolStep::TakingRest { free }, Event::Took(took)) => {
                self.taken.extend(took);
                self.take_rest(free, may_try)
            }
            (PoolStep::WaitingForRest, Event::Drew(ticket)) => {
                self.ticket = Some(ticket);
                self.wait_for_rest()
            }
            (PoolStep::WaitingForRest, Event::CollectorLockLost) => {
                self.collects = false;
                Do::GiveBack
            }
            (PoolStep::WaitingForRest, _) => Do::Done { waited: true },
            (step, event) => unreachable!("{event:?} in {step:?}"),
        }
    }

    /// Everything that was acquired was released: starts again, or waits for the collector lock.
    pub(crate) fn given_back(&mut self, may_try: &dyn Fn(usize) -> bool) -> Do {
        self.taken.clear();
        self.tried.clear();
        match self.step {
            PoolStep::TakingAll { .. } => self.wait_for_collector_lock(),
            _ => self.begin(may_try),
        }
    }

    fn is_complete(&self) -> bool {
        self.taken.len() >= self.wanted
    }

    /// Takes, in one round trip, the members that a free pool would give.
    fn take_first(&mut self, may_try: &dyn Fn(usize) -> bool) -> Do {
        let first: Vec<usize> = (0..self.members).filter(|which| may_try(*which)).take(self.wanted).collect();
        if first.is_empty() {
            return self.wait_for_rest();
        }
        self.tried.extend(&first);
        self.step = PoolStep::TakingFirst;
        Do::Try(first)
    }

    fn take_rest(&mut self, free: Vec<usize>, may_try: &dyn Fn(usize) -> bool) -> Do {
        match self.try_some_of(&free, may_try) {
            Some(next) => {
                self.step = PoolStep::TakingRest { free };
                Do::Try(next)
            }
            None => self.wait_for_rest(),
        }
    }

    fn take_all(&mut self, free: Vec<usize>, may_try: &dyn Fn(usize) -> bool) -> Do {
        if self.is_complete() {
            return Do::Done { waited: false };
        }
        let next = self.try_some_of(&free, may_try);
        self.step = PoolStep::TakingAll { free };
        match next {
            Some(next) => Do::Try(next),
            // No request waits with a part in hand and without the collector lock.
            None => Do::GiveBack,
        }
    }

    /// As many members as are missing, of those that were seen free and not tried since.
    fn try_some_of(&mut self, free: &[usize], may_try: &dyn Fn(usize) -> bool) -> Option<Vec<usize>> {
        let missing = self.wanted - self.taken.len().min(self.wanted);
        let untried = free.iter().copied().filter(|which| !self.tried.contains(which) && may_try(*which));
        let next: Vec<usize> = untried.take(missing).collect();
        self.tried.extend(&next);
        (!next.is_empty()).then_some(next)
    }

    fn wait_for_collector_lock(&mut self) -> Do {
        if !self.may_wait {
            return Do::Late;
        }
        self.step = PoolStep::WaitingForCollectorLock;
        self.ticket.map_or(Do::Draw, Do::WaitForCollectorLock)
    }

    /// Waits for what is still missing.
    fn wait_for_rest(&mut self) -> Do {
        if self.is_complete() {
            return Do::Done { waited: false };
        }
        if !self.may_wait {
            return Do::Late;
        }
        self.step = PoolStep::WaitingForRest;
        self.ticket.map_or(Do::Draw, Do::WaitForRest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &dyn Fn(usize) -> bool = &|_| true;

    #[test]
    fn one_member_is_tried_then_looked_for_then_waited_for() {
        let mut call = PoolCall::new(1, 3, true);
        assert_eq!(call.begin(&|which| which > 0), Do::Try(vec![1]), "tasks of this process wait for member 0");
        assert_eq!(call.next(Event::Took(vec![]), ALL), Do::Look);
        assert_eq!(call.next(Event::Free(vec![1, 2]), ALL), Do::Try(vec![2]), "1 was tried before");
        assert_eq!(call.next(Event::Took(vec![]), ALL), Do::Draw);
        assert_eq!(call.next(Event::Drew(Ticket(5)), ALL), Do::WaitForRest(Ticket(5)));
        assert_eq!(call.next(Event::Complete, ALL), Do::Done { waited: true });
    }

    #[test]
    fn a_request_that_does_not_wait_is_late() {
        let mut call = PoolCall::new(1, 2, false);
        assert_eq!(call.begin(ALL), Do::Try(vec![0]));
        assert_eq!(call.next(Event::Took(vec![]), ALL), Do::Look);
        assert_eq!(call.next(Event::Free(vec![]), ALL), Do::Late);
        let mut several = PoolCall::new(2, 2, false);
        assert_eq!(several.begin(ALL), Do::TryCollectorLock { draw: false });
        let tried = Event::CollectorLockTried { granted: false, ticket: None };
        assert_eq!(several.next(tried, ALL), Do::Look);
        assert_eq!(several.next(Event::Free(vec![0, 1]), ALL), Do::Try(vec![0, 1]), "free at once");
        assert_eq!(several.next(Event::Took(vec![1]), ALL), Do::GiveBack);
        assert_eq!(several.given_back(ALL), Do::Late);
    }

    #[test]
    fn several_are_collected_under_the_collector_lock() {
        let mut call = PoolCall::new(2, 3, true);
        assert_eq!(call.begin(ALL), Do::TryCollectorLock { draw: true });
        let tried = Event::CollectorLockTried { granted: true, ticket: Some(Ticket(5)) };
        assert_eq!(call.next(tried, ALL), Do::Try(vec![0, 1]));
        assert_eq!(call.next(Event::Took(vec![1]), ALL), Do::Look);
        assert_eq!(call.next(Event::Free(vec![]), ALL), Do::WaitForRest(Ticket(5)));
        // The lock is lost: all members are released, and the request starts again with its ticket.
        assert_eq!(call.next(Event::CollectorLockLost, ALL), Do::GiveBack);
        assert_eq!(call.given_back(ALL), Do::TryCollectorLock { draw: false });
    }

    #[test]
    fn no_request_waits_with_a_part_and_without_the_collector_lock() {
        let mut call = PoolCall::new(2, 4, true);
        call.begin(ALL);
        let tried = Event::CollectorLockTried { granted: false, ticket: Some(Ticket(5)) };
        assert_eq!(call.next(tried, ALL), Do::Look);
        assert_eq!(call.next(Event::Free(vec![1, 2, 3]), ALL), Do::LookForWaiters);
        assert_eq!(call.next(Event::OthersWait(false), ALL), Do::Try(vec![1, 2]));
        assert_eq!(call.next(Event::Took(vec![2]), ALL), Do::Try(vec![3]));
        assert_eq!(call.next(Event::Took(vec![]), ALL), Do::GiveBack);
        assert_eq!(call.given_back(ALL), Do::WaitForCollectorLock(Ticket(5)));
        assert_eq!(call.next(Event::CollectorLockGranted, ALL), Do::WaitForRest(Ticket(5)), "older than the waiters");
        assert_eq!(call.next(Event::Complete, ALL), Do::Done { waited: true });
    }

    #[test]
    fn older_requests_for_the_collector_lock_are_not_overtaken() {
        let mut call = PoolCall::new(2, 2, true);
        call.begin(ALL);
        call.next(Event::CollectorLockTried { granted: false, ticket: Some(Ticket(5)) }, ALL);
        assert_eq!(call.next(Event::Free(vec![0, 1]), ALL), Do::LookForWaiters);
        assert_eq!(call.next(Event::OthersWait(true), ALL), Do::WaitForCollectorLock(Ticket(5)));
    }
}

//! How a test sees the state of a client: each type visits its fields once, so that a test can compare, age and renumber
//! them.

use crate::clock::Moment;
use crate::facts::{Fence, Token};
use crate::store::{Grant, Ticket};

/// What a test does with each field. Fields that decide only what people see are not visited.
pub(crate) trait Visit {
    /// A moment from which a lease counts.
    fn start(&mut self, moment: &mut Moment);
    /// A moment at which a belief ends.
    fn end(&mut self, moment: &mut Moment);
    /// A moment that decides only when a request is sent.
    fn timer(&mut self, moment: &mut Moment);
    /// A fence or a ticket; 0 where it is unknown.
    fn number(&mut self, number: &mut u64);
    fn token(&mut self, token: &mut Token);
    /// Any other part of the state.
    fn count(&mut self, count: usize);

    fn flag(&mut self, flag: bool) {
        self.count(usize::from(flag));
    }

    fn fence(&mut self, fence: &mut Option<Fence>) {
        let mut number = fence.map_or(0, Fence::get);
        self.number(&mut number);
        *fence = fence.map(|_| Fence::new(number));
    }

    fn ticket(&mut self, ticket: &mut Option<Ticket>) {
        let mut number = ticket.map_or(0, |Ticket(number)| number);
        self.number(&mut number);
        *ticket = ticket.map(|_| Ticket(number));
    }

    fn grant(&mut self, grant: &mut Grant) {
        self.fence(&mut grant.fence);
        self.start(&mut grant.asked_at);
        self.count(usize::try_from(grant.lasts.as_millis()).unwrap_or(usize::MAX));
    }
}

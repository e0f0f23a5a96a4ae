//! The renewal task: it renews or checks all leases of a process that are due, in one batched pass, earliest deadline
//! first. It notifies a holder the moment its lease is lost, or can no longer be proven. `LeaseState` decides.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio_util::sync::CancellationToken;

use super::core::Core;
use super::lease_cell::LeaseCell;
use super::leases::Leases;
use crate::client::renewal::{PASS, Sent, Then, Verdict};
use crate::clock::{Moment, Sleeper};
use crate::events::{EventKind, Transition};
use crate::store::{Note, Operation, Renewal, Renewed};

/// Renewals in one request.
const PASS_SIZE: usize = 1_000;

/// One renewal or check in flight.
struct RenewalInFlight {
    cell: Arc<LeaseCell>,
    sent: Sent,
}

/// The renewal task.
pub(super) async fn run(core: Arc<Core>, leases: Arc<Leases>, ended: CancellationToken) {
    let mut passes = FuturesUnordered::new();
    // A memory store works in a runtime without I/O, and its leases concern no other process.
    let in_memory = core.store.describe() == "memory:";
    let mut sleeper = if in_memory { Sleeper::without_alarm() } else { Sleeper::with_alarm() };
    loop {
        let mut due = look(&core, &leases, Moment::now());
        while !due.is_empty() {
            let rest = due.split_off(due.len().min(PASS_SIZE));
            passes.push(renew(&core, std::mem::replace(&mut due, rest)));
        }
        let next = leases.next_look();
        tokio::select! {
            biased;
            () = ended.cancelled() => return,
            Some((asked_at, pass, answers)) = passes.next(), if !passes.is_empty() => {
                for (in_flight, answer) in pass.iter().zip(answers) {
                    take_answer(&core, &leases, in_flight, asked_at, &answer);
                }
            }
            () = sleeper.until(next) => {}
            () = leases.changed.notified() => {}
        }
    }
}

/// Looks at every lease that is due. Returns those to renew or check, earliest deadline first.
fn look(core: &Core, leases: &Leases, now: Moment) -> Vec<RenewalInFlight> {
    let due = leases.due_until(now + PASS);
    let mut to_ask = Vec::new();
    for cell in due {
        let mut state = cell.state();
        let look = state.look(now);
        if look.publish {
            let event = cell.event(EventKind::Granted, &state.owner.to_string(), "");
            core.publisher.note(Note::Tell(event));
            let (name, holder) = (cell.name.clone(), cell.token.holder_id());
            core.publisher.note(Note::Enter { name, holder, lasts: state.ttl.duration() });
        }
        let look_again = match look.then {
            Then::Wait(until) => until,
            Then::Ask { prolong, look_again } => {
                let sent = state.request(prolong);
                to_ask.push((state.belief.valid_until(), RenewalInFlight { cell: cell.clone(), sent }));
                look_again
            }
            Then::Lost(why) => {
                drop(state);
                leases.lose(&cell, why);
                continue;
            }
        };
        drop(state);
        leases.look_at(&cell, look_again);
    }
    to_ask.sort_by_key(|(deadline, _)| *deadline);
    to_ask.into_iter().map(|(_, in_flight)| in_flight).collect()
}

async fn renew(core: &Core, pass: Vec<RenewalInFlight>) -> (Moment, Vec<RenewalInFlight>, Vec<Renewed>) {
    let renewals: Vec<Renewal> = pass.iter().map(|RenewalInFlight { cell, sent }| cell.renewal(sent)).collect();
    let asked_at = Moment::now();
    let answers = match core.within(async { Ok(core.store.renew(&renewals).await) }).await {
        Ok(answers) => {
            core.answered(Operation::Renew, asked_at, Moment::now());
            answers
        }
        Err(error) => vec![Renewed::Unknown(error); renewals.len()],
    };
    (asked_at, pass, answers)
}

fn take_answer(
    core: &Core,
    leases: &Leases,
    RenewalInFlight { cell, sent }: &RenewalInFlight,
    asked_at: Moment,
    answer: &Renewed,
) {
    let mut state = cell.state();
    let verdict = state.answered(Moment::now(), sent, asked_at, answer);
    let (published, lasts) = (state.published, state.ttl.duration());
    drop(state);
    match verdict {
        Verdict::Lost(why) => return leases.lose(cell, why),
        Verdict::Checked => tracing::trace!(name = %cell.name, "checked"),
        Verdict::Renewed { slack } => {
            if published {
                core.publisher.note(Note::Enter { name: cell.name.clone(), holder: cell.token.holder_id(), lasts });
            }
            tracing::trace!(name = %cell.name, ?slack, "renewed");
            core.publisher.observe(&Transition::Renewed { name: cell.name.as_str(), slack });
        }
        Verdict::Unanswered => {
            if let Renewed::Unknown(error) = answer {
                if sent.prolong {
                    tracing::warn!(name = %cell.name, %error, "a renewal was not answered");
                } else {
                    tracing::debug!(name = %cell.name, %error, "a check was not answered");
                }
                let kind = error.kind();
                core.publisher.observe(&Transition::StoreFailed { operation: Operation::Renew, kind });
            }
        }
    }
    leases.touch(cell);
}

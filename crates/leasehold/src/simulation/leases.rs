//! Watches the leases of the engines: after each step of a process, its leases are compared with those before it.

use std::cell::Cell;
use std::sync::Arc;

use super::coverage::Situation;
use super::plan::COLLECTOR;
use super::process::Process;
use super::world::World;
use crate::clock::Moment;
use crate::engine::lease_cell::LeaseCell;
use crate::facts::{Fence, LockName, Token};
use crate::loss::LossReason;

/// A lease as it was after the last step of its process.
pub(super) struct KnownLease {
    lease: Arc<LeaseCell>,
    valid_until: Moment,
    lost: Option<LossReason>,
}

/// What the caller by token believes after its call.
pub(super) struct TokenLease {
    pub(super) process: usize,
    pub(super) name: LockName,
    pub(super) token: Token,
    pub(super) fence: Option<Fence>,
    pub(super) valid_until: Cell<Moment>,
    /// Several calls were made with its token.
    pub(super) was_asked_twice: bool,
}

fn is_member(name: &LockName) -> bool {
    name.as_str().starts_with("p:") && name.as_str() != COLLECTOR
}

impl World {
    /// Checks what a step has changed about the leases of a process.
    pub(super) fn compare_leases(&self, process: &Process) {
        let now = Moment::now();
        let leases = process.engine.leases.all();
        let mut known = process.known.borrow_mut();
        if known.len() > leases.len() || !leases.iter().all(|lease| known.contains_key(&lease.token)) {
            known.retain(|token, before| {
                let is_there = leases.iter().any(|lease| lease.token == *token);
                if !is_there {
                    self.lease_ended(process, before);
                }
                is_there
            });
        }
        for lease in leases {
            let (valid_until, lost) = {
                let state = lease.state();
                (state.belief.valid_until(), state.lost)
            };
            let Some(before) = known.get_mut(&lease.token) else {
                self.lease_began(process, &lease);
                known.insert(lease.token.clone(), KnownLease { lease, valid_until, lost });
                continue;
            };
            if before.lost.is_none()
                && let Some(why) = lost
            {
                before.lost = lost;
                self.lease_lost(process, &lease, why);
            }
            let old = std::mem::replace(&mut before.valid_until, valid_until);
            if old != valid_until {
                self.saw(Situation::Renewed);
                self.tell(|| format!("{} has renewed {}", process.name(), lease.name));
                if lease.is_valid(now) && now >= old {
                    self.fail(|| format!("a belief in the lease of \"{}\" that had lapsed was revived", lease.name));
                }
                self.check_belief(&lease.name, &lease.token);
            }
        }
    }

    fn lease_began(&self, process: &Process, lease: &Arc<LeaseCell>) {
        self.saw(match (lease.waited, lease.handed_over) {
            (false, _) => Situation::GrantByTry,
            (true, true) => Situation::GrantByMessage,
            (true, false) => Situation::GrantByReply,
        });
        if lease.state().lost == Some(LossReason::Revoked) {
            return self.saw(Situation::EarlyRevocation);
        }
        if !lease.waited {
            self.check_order(&lease.name, lease.fence);
        }
        self.believes(process.which, lease);
    }

    fn lease_lost(&self, process: &Process, lease: &LeaseCell, why: LossReason) {
        match why {
            LossReason::Gone => self.saw(Situation::LostGone),
            LossReason::Revoked => self.saw(Situation::LostRevoked),
            LossReason::Expired => self.saw(Situation::LapsedBelief),
            _ => {}
        }
        if lease.name.as_str() == COLLECTOR {
            self.saw(Situation::CollectorLockLost);
        } else if is_member(&lease.name) && !process.received.borrow().contains(&lease.token) {
            self.saw(Situation::MemberLost);
        }
        self.tell(|| format!("{} loses {}: {why}", process.name(), lease.name));
        self.knows_loss(process.which, lease, why);
    }

    fn lease_ended(&self, process: &Process, before: &KnownLease) {
        let lease = &before.lease;
        self.gave_up(&lease.name, &lease.token);
        if process.received.borrow_mut().remove(&lease.token) {
            return;
        }
        let was_over = before.lost.is_some() || Moment::now() >= before.valid_until;
        if is_member(&lease.name) && !was_over {
            self.saw(Situation::PoolGaveBack);
        } else if !lease.name.as_str().starts_with("p:") && was_over {
            self.saw(Situation::LapsedInReply);
        }
    }
}

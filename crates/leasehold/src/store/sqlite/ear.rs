//! The thread that listens: at our own FIFO for wake-ups, at others' for their deaths.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::alive::Alive;
use super::driver::Command;
use crate::clock::Moment;
use crate::machine::InboxId;

/// While we wait, everything is looked at this often whatever was or was not heard.
const BACKSTOP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// What the two threads share.
#[derive(Default)]
pub(super) struct Watch {
    holders: Mutex<HashMap<InboxId, Arc<OwnedFd>>>,
    waiting: AtomicUsize,
    read_up_to: AtomicI64,
    stopped: AtomicBool,
}

impl Watch {
    /// How many places in queues we have.
    pub(super) fn set_waiting(&self, places: usize, alive: &Alive) {
        // The first one sets the clock going.
        if self.waiting.swap(places, Ordering::Relaxed) == 0 && places > 0 {
            alive.wake(alive.id());
        }
    }

    /// Watches for one more death. `false`: it cannot be watched; it may have died just now.
    pub(super) fn add(&self, holder: InboxId, alive: &Alive) -> bool {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        if holders.contains_key(&holder) {
            return true;
        }
        let Some(end) = alive.watch(&holder) else { return false };
        holders.insert(holder, Arc::new(end));
        drop(holders);
        alive.wake(alive.id());
        true
    }

    /// Watches for these deaths and no others. `false`: one of them cannot be watched.
    pub(super) fn keep(&self, wanted: &HashSet<InboxId>, alive: &Alive) -> bool {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner).retain(|id, _| wanted.contains(id));
        wanted.iter().filter(|holder| !self.add((*holder).clone(), alive)).count() == 0
    }

    /// The last message that was told but could not be cleared away; 0: none.
    pub(super) fn read_up_to(&self) -> i64 {
        self.read_up_to.load(Ordering::Relaxed)
    }

    pub(super) fn set_read_up_to(&self, id: i64) {
        self.read_up_to.store(id, Ordering::Relaxed);
    }

    /// Ends the thread.
    pub(super) fn stop(&self, alive: &Alive) {
        self.stopped.store(true, Ordering::Release);
        alive.wake(alive.id());
    }
}

/// Listens until the store is closed.
pub(super) fn listen(alive: &Alive, watch: &Watch, driver: &Sender<Command>) {
    let Some(fifo) = alive.fifo() else { return };
    let mut looked = Moment::now();
    while !watch.stopped.load(Ordering::Acquire) {
        let holders: Vec<(InboxId, Arc<OwnedFd>)> = {
            let holders = watch.holders.lock().unwrap_or_else(PoisonError::into_inner);
            holders.iter().map(|(id, end)| (id.clone(), end.clone())).collect()
        };
        let mut ends = vec![PollFd::new(&*fifo, PollFlags::IN)];
        ends.extend(holders.iter().map(|(_, end)| PollFd::new(&**end, PollFlags::empty())));
        let timeout = (watch.waiting.load(Ordering::Relaxed) > 0).then_some(&BACKSTOP);
        if poll(&mut ends, timeout).is_err() {
            continue;
        }
        let heard = ends[0].revents().contains(PollFlags::IN);
        let is_dead = |end: &PollFd<'_>| end.revents().intersects(PollFlags::ERR | PollFlags::NVAL);
        let dead: Vec<&InboxId> =
            holders.iter().zip(&ends[1..]).filter(|(_, end)| is_dead(end)).map(|((id, _), _)| id).collect();
        if heard {
            drain(&fifo);
        }
        if !dead.is_empty() {
            let mut watched = watch.holders.lock().unwrap_or_else(PoisonError::into_inner);
            watched.retain(|id, _| !dead.contains(&id));
        }
        // Also when there was so much to hear that no second ever passed in silence.
        let due = timeout.is_some() && looked.until(Moment::now()) >= Duration::from_secs(1);
        let look = due || !dead.is_empty();
        if look {
            looked = Moment::now();
        }
        let sent = match (heard, look) {
            (true, true) => driver.send(Command::Heard).and(driver.send(Command::LookAround)),
            (true, false) => driver.send(Command::Heard),
            (false, true) => driver.send(Command::LookAround),
            (false, false) => Ok(()),
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Takes everything out of our FIFO.
fn drain(fifo: &OwnedFd) {
    let mut bytes = [0_u8; 256];
    while rustix::io::read(fifo, &mut bytes[..]).is_ok_and(|n| n == bytes.len()) {}
}

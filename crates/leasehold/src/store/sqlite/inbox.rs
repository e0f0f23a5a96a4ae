//! The inbox of this process: a thread that reads our FIFO for wake-ups and watches other FIFOs for deaths, and the
//! messages that other processes left in the database.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::boot::moment;
use super::death_watch::DeathWatch;
use super::driver::SqliteDriver;
use super::liveness::Liveness;
use super::row;
use super::serve::Command;
use crate::clock::Moment;
use crate::machine::{InboxId, Message};

/// While attempts of this process wait, their holders are checked at this interval, whether or not a wake-up came.
const BACKSTOP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Runs the inbox thread until the store is closed.
pub(super) fn listen(liveness: &Liveness, watch: &DeathWatch, driver: &Sender<Command>) {
    let Some(fifo) = liveness.fifo() else { return };
    let mut looked = Moment::now();
    while !watch.is_stopped() {
        let holders = watch.watched();
        let mut ends = vec![PollFd::new(&*fifo, PollFlags::IN)];
        ends.extend(holders.iter().map(|(_, end)| PollFd::new(&**end, PollFlags::empty())));
        let timeout = watch.is_waiting().then_some(&BACKSTOP);
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
            watch.remove(&dead);
        }
        // Checked by the clock as well: under constant wake-ups, `poll` never times out.
        let due = timeout.is_some() && looked.until(Moment::now()) >= Duration::from_secs(1);
        let look = due || !dead.is_empty();
        if look {
            looked = Moment::now();
        }
        let sent = match (heard, look) {
            (true, true) => driver.send(Command::Wake).and(driver.send(Command::CheckHolders)),
            (true, false) => driver.send(Command::Wake),
            (false, true) => driver.send(Command::CheckHolders),
            (false, false) => Ok(()),
        };
        if sent.is_err() {
            return;
        }
    }
}

impl SqliteDriver {
    /// Reads and delivers the messages that other processes left for this one.
    pub(super) fn read_messages(&mut self) {
        const READ: &str = "SELECT id, kind, token, fence, lasts_ms, at, reason FROM messages \
                            WHERE inbox = ?1 AND id > ?2 ORDER BY id";
        const CLEAR: &str = "DELETE FROM messages WHERE inbox = ?1 AND id <= ?2";
        let me = self.liveness.id().clone();
        let found = (|| {
            let mut statement = self.conn.prepare_cached(READ)?;
            let rows = statement.query_map((&*me.0, self.read_up_to), row::message_row)?;
            rows.collect::<rusqlite::Result<Vec<_>>>()
        })();
        let Ok(found) = found else { return };
        let Some((last, _, _)) = found.last() else { return };
        let last = *last;
        // Delivered first, so that their receivers start while the rows are deleted.
        for (_, message, at_ms) in found {
            if let Some(message) = message {
                self.receive(message, at_ms);
            }
        }
        let cleared = self.conn.prepare_cached(CLEAR).and_then(|mut s| s.execute((&*me.0, last)));
        // Ids start over once all messages are deleted. Until then, this keeps a message from being delivered twice.
        self.read_up_to = if cleared.is_ok() { 0 } else { last };
        self.committed();
    }

    /// Delivers a message to this process.
    pub(super) fn receive(&mut self, message: Message, at_ms: u64) {
        match &message {
            Message::Granted { token, .. } => self.waiters.granted(token),
            Message::LookAgain { token, .. } => self.waiters.recheck(token),
            Message::Revoked { .. } | Message::Finish { .. } => {}
        }
        // The receiver may have been dropped. The state in the database is what counts.
        self.pushes.send(message.into_push(moment(at_ms)));
    }
}

/// Empties our FIFO.
fn drain(fifo: &OwnedFd) {
    let mut bytes = [0_u8; 256];
    while rustix::io::read(fifo, &mut bytes[..]).is_ok_and(|n| n == bytes.len()) {}
}

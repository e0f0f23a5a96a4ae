//! What `once` does beyond `run`: it captures CMD's output, and stores the result.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use leasehold::once::ResultSlot;

use super::capture::Capture;
use super::keeper::{Keeper, lost_text};
use super::lease::Lease;
use super::stored_result;
use crate::exit::{Exit, Failure};
use crate::output;

/// Puts pipes between CMD and the keeper's stdout and stderr. Returns the captures, and CMD's ends of the pipes.
pub(super) fn capture_output() -> io::Result<((Capture, Capture), (OwnedFd, OwnedFd))> {
    let (out, commands_out) = Capture::start(io::stdout().as_fd().try_clone_to_owned()?)?;
    let (err, commands_err) = Capture::start(io::stderr().as_fd().try_clone_to_owned()?)?;
    Ok(((out, err), (commands_out, commands_err)))
}

/// Removes the record of this run, so that the next `once` does not take it for a run that died.
pub(super) async fn forget(slot: Option<&ResultSlot>) {
    if let Some(slot) = slot {
        // Without an answer the record stays, and the next `once` runs CMD all the same.
        let _ = slot.forget().await;
    }
}

impl Keeper {
    /// Stores CMD's output and exit code while the lock is held.
    pub(super) async fn store_result(
        &mut self,
        lease: &Lease,
        slot: &ResultSlot,
        (mut out, mut err): (Capture, Capture),
        code: u8,
        status: ExitStatus,
    ) -> Result<(), Exit> {
        let until_ok = self.args.once.as_ref().is_some_and(|once| once.until_ok);
        let mut interrupted = false;
        loop {
            let forwarded = async {
                out.finish().await;
                err.finish().await;
            };
            tokio::select! {
                () = forwarded => break,
                // No reader takes our output, and a signal asks for the end: the rest is captured and not forwarded.
                _ = Self::cancelled(&self.channel, &mut self.stops), if !interrupted => interrupted = true,
                why = lease.lost() => {
                    output::failure(&Failure::new(Exit::Lost, lost_text(lease, Some(why))));
                    return Err(Exit::Lost);
                }
            }
            out.stop_forwarding();
            err.stop_forwarding();
        }
        if status.signal().is_some() || (until_ok && code != 0) {
            forget(Some(slot)).await;
            return Ok(());
        }
        let id = &lease.name();
        match slot.store(lease.guard(), &stored_result::encode(code, &out.captured(), &err.captured())).await {
            Ok(true) => Ok(()),
            Ok(false) => {
                let text = format!("{id} is done, but its result could not be stored: the next one runs it again");
                output::failure(&Failure::new(Exit::Unreachable, text));
                Ok(())
            }
            Err(error) => {
                let failure = Failure::from(error);
                output::failure(&failure);
                Err(failure.exit)
            }
        }
    }
}

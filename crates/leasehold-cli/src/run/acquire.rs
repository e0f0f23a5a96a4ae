//! The keeper acquires the lock, GPUs, or the result of work that is done once. Signals cancel that.

use std::os::fd::AsFd;
use std::time::Duration;

use leasehold::lease::Moment;
use leasehold::once::{Done, ResultSlot, Started};
use leasehold::{LockManager, Owner};
use nix::sys::signal::Signal;

use super::channel::{AsyncChannel, signal_number};
use super::deadlines::Deadlines;
use super::front_messages::ToFront;
use super::keeper::{Keeper, RunExit, ttl};
use super::launch::Starting;
use super::lease::Lease;
use super::{not_acquired, progress, stored_result};
use crate::cli::RunArgs;
use crate::exit::{Exit, Failure};
use crate::signals::{is_stop, is_termination};
use crate::store::Choice;

/// A successful acquisition.
enum Acquired {
    /// The lock, or GPUs; for `once`, with the slot for the result.
    Lock(Lease, Option<ResultSlot>),
    /// The result of another run of `once`.
    Done(Done),
}

/// A failed acquisition.
enum AcquireFailure {
    Error(leasehold::Error),
    Failed(Failure),
}

impl Keeper {
    /// Acquires and confirms the lock. Returns how the run ends if there is none.
    pub(super) async fn acquire(
        &mut self,
        store: &Choice,
        starting: Starting,
    ) -> Result<Result<(Lease, Option<ResultSlot>), RunExit>, Failure> {
        let acquired = Self::connect_and_acquire(
            &self.args,
            &self.owner,
            store,
            &self.channel,
            &mut self.locks,
            &self.deadlines,
            starting,
        );
        let cancelled = Self::cancelled(&self.channel, &mut self.stops);
        let outcome = tokio::select! {
            biased;
            cancelled = cancelled => Err(cancelled),
            outcome = acquired => Ok(outcome),
        };
        let (guard, slot) = match outcome {
            Err(by) => {
                let code = by.map_or(128 + 9, |signal| 128 + signal_number(signal));
                // The shutdown gives up the place in the queue, or the lock.
                if let Some(locks) = self.locks.take() {
                    locks.shutdown().await;
                }
                return Ok(Err(RunExit { code, by }));
            }
            Ok(Err(error)) => return self.not_acquired(error).await.map(Err),
            Ok(Ok(Acquired::Done(done))) => return self.replay(done).await.map(Err),
            Ok(Ok(Acquired::Lock(guard, slot))) => (guard, slot),
        };
        // Stopped while waiting: CMD starts when the shell continues the job.
        while self.stops > 0 {
            match self.channel.next_signal().await {
                Some(received) if received.signal == Signal::SIGCONT => self.stops = self.stops.saturating_sub(1),
                Some(received) if is_termination(received.signal) => {
                    self.release(guard).await;
                    return Ok(Err(RunExit { code: 128 + signal_number(received.signal), by: Some(received.signal) }));
                }
                Some(_) => {}
                None => {
                    self.release(guard).await;
                    return Ok(Err(Exit::Code(128 + 9).into()));
                }
            }
        }
        Ok(Ok((guard, slot)))
    }

    /// Writes the stored output of another run, and ends with its exit code.
    async fn replay(&mut self, done: Done) -> Result<RunExit, Failure> {
        let (send_result, written) = tokio::sync::oneshot::channel();
        // On a thread of its own: a slow reader must not keep signals waiting.
        std::thread::spawn(move || send_result.send(stored_result::replay(&done)));
        let cancelled = Self::cancelled(&self.channel, &mut self.stops);
        tokio::select! {
            written = written => {
                let ended = || Failure::new(Exit::Output, "the stored output could not be written");
                written.map_err(|_| ended())?.map(|code| Exit::Code(code).into())
            }
            by = cancelled => {
                let code = by.map_or(128 + 9, |signal| 128 + signal_number(signal));
                Ok(RunExit { code, by })
            }
        }
    }

    /// Opens the store and waits for the lock.
    async fn connect_and_acquire(
        args: &RunArgs,
        owner: &Owner,
        store: &Choice,
        channel: &AsyncChannel,
        locks: &mut Option<LockManager>,
        deadlines: &Deadlines,
        starting: Starting,
    ) -> Result<Acquired, AcquireFailure> {
        let mut options = store.options().map_err(AcquireFailure::Failed)?;
        options.owner = owner.clone();
        options.ttl = ttl(args);
        let locks = locks.insert(store.connect_with(options).await.map_err(AcquireFailure::Failed)?);
        // Without a guardian no lock is asked for.
        starting.wait().map_err(AcquireFailure::Failed)?;
        if let Some(lifeline) = locks.lifeline() {
            // Before the lock is acquired: the descriptor counts even while it is in the socket.
            channel.send(&ToFront::Lifeline, &[lifeline.as_fd()]);
        }
        let waiting = Self::wait_for(args, locks, store);
        let acquired = if args.no_wait {
            waiting.await
        } else {
            tokio::select! {
                biased;
                acquired = waiting => acquired,
                () = progress::show(locks, args, owner) => unreachable!("the status line is drawn until it is dropped"),
            }
        };
        let (guard, slot) = match acquired? {
            Acquired::Lock(guard, slot) => (guard, slot),
            done @ Acquired::Done(_) => return Ok(done),
        };
        // A lease that was handed over is short until it is confirmed: too short to start CMD.
        if Moment::now() >= deadlines.give_up_at(guard.valid_until()) {
            guard.extend(ttl(args).duration()).await.map_err(AcquireFailure::Error)?;
        }
        Ok(Acquired::Lock(guard, slot))
    }

    /// Waits for the lock, GPUs or a result, as the command line says.
    async fn wait_for(args: &RunArgs, locks: &LockManager, store: &Choice) -> Result<Acquired, AcquireFailure> {
        let wait = if args.no_wait { Some(Duration::ZERO) } else { args.wait };
        if let Some(gpu) = &args.gpu {
            let scope = store.gpu_scope().map_err(AcquireFailure::Failed)?;
            let request = gpu.request(locks, scope, args.gpus).map_err(AcquireFailure::Failed)?.lock_timeout(ttl(args));
            let gpus = request.wait_up_to(wait.unwrap_or(Duration::MAX)).await;
            return gpus.map(|gpus| Acquired::Lock(gpus.into(), None)).map_err(AcquireFailure::Error);
        }
        let Some(once) = &args.once else {
            let name = args.name.as_ref().expect("the command line has a name, or GPUs");
            let request = locks.lock(name);
            let request = if let Some(wait) = wait { request.wait_up_to(wait) } else { request };
            return request.await.map(|guard| Acquired::Lock(guard.into(), None)).map_err(AcquireFailure::Error);
        };
        let request = locks.once(once.id.as_str()).keep(once.keep.duration());
        let request = if let Some(wait) = wait { request.wait_up_to(wait) } else { request };
        Ok(match request.start().await.map_err(AcquireFailure::Error)? {
            Started::Done(done) => Acquired::Done(done),
            Started::Run(running) => {
                let (guard, slot) = running.split();
                Acquired::Lock(guard.into(), Some(slot))
            }
        })
    }

    /// Waits until the run is cancelled. Returns the signal that cancels it, or `None` if the front was killed.
    pub(super) async fn cancelled(channel: &AsyncChannel, stops: &mut u32) -> Option<Signal> {
        loop {
            match channel.next_signal().await {
                None => return None,
                Some(received) if is_stop(received.signal) => {
                    *stops += 1;
                    channel.send(&ToFront::Stop(received.signal), &[]);
                }
                Some(received) if received.signal == Signal::SIGCONT => *stops = stops.saturating_sub(1),
                Some(received) if is_termination(received.signal) => return Some(received.signal),
                Some(_) => {}
            }
        }
    }

    /// Reports why there is no lock. With `--json` the report is data on stdout, and a signal ends the writing.
    async fn not_acquired(&mut self, why: AcquireFailure) -> Result<RunExit, Failure> {
        let error = match why {
            AcquireFailure::Failed(failure) => return Err(failure),
            AcquireFailure::Error(error) => error,
        };
        let failure = not_acquired::failure(error, self.locks.as_ref(), self.json, self.args.conflict_exit_code);
        tokio::select! {
            failure = failure => Err(failure),
            by = Self::cancelled(&self.channel, &mut self.stops) => {
                let code = by.map_or(128 + 9, |signal| 128 + signal_number(signal));
                Ok(RunExit { code, by })
            }
        }
    }
}

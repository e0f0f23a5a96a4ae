//! The keeper asks: for the lock, GPUs, or the result of work that is done once. It can be told to stop asking.

use std::os::fd::AsFd;
use std::time::Duration;

use leasehold::lease::Moment;
use leasehold::once::{Done, ResultSlot, Started};
use leasehold::{LockManager, Owner};
use nix::sys::signal::Signal;

use super::deadline::Deadlines;
use super::keeper::{End, Keeper, number, ttl};
use super::lease::Lease;
use super::link::{Ear, ToFront};
use super::{held, result, waiting};
use crate::cli::RunArgs;
use crate::exit::{Exit, Failure};
use crate::signals::{ends, stops};
use crate::store::Choice;

/// What was asked for.
enum Got {
    /// The lock; of `once`, with the place for the result.
    Lock(Lease, Option<ResultSlot>),
    /// Somebody has done it.
    Done(Done),
}

/// Why there is neither.
enum NotGot {
    Error(leasehold::Error),
    Failed(Failure),
}

impl Keeper {
    /// The lock, confirmed; or how the run ends without it.
    pub(super) async fn acquire(
        &mut self,
        store: &Choice,
    ) -> Result<Result<(Lease, Option<ResultSlot>), End>, Failure> {
        let asked = Self::ask(&self.args, &self.owner, store, &self.link, &mut self.locks, &self.deadlines);
        let cancelled = Self::cancelled(&self.link, &mut self.stops);
        let outcome = tokio::select! {
            biased;
            cancelled = cancelled => Err(cancelled),
            outcome = asked => Ok(outcome),
        };
        let (guard, slot) = match outcome {
            Err(by) => {
                let code = by.map_or(128 + 9, |signal| 128 + number(signal));
                // What was asked for is given back before we are gone.
                if let Some(locks) = self.locks.take() {
                    locks.shutdown().await;
                }
                return Ok(Err(End { code, by }));
            }
            Ok(Err(error)) => return self.not_acquired(error).await.map(Err),
            Ok(Ok(Got::Done(done))) => return self.replay(done).await.map(Err),
            Ok(Ok(Got::Lock(guard, slot))) => (guard, slot),
        };
        // Stopped while waiting: the job goes on when the shell says so.
        while self.stops > 0 {
            match self.link.hear().await {
                Some(came) if came.signal == Signal::SIGCONT => self.stops = self.stops.saturating_sub(1),
                Some(came) if ends(came.signal) => {
                    self.release(guard).await;
                    return Ok(Err(End { code: 128 + number(came.signal), by: Some(came.signal) }));
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

    /// Another one ran it: its output is ours, and its exit code.
    async fn replay(&mut self, done: Done) -> Result<End, Failure> {
        let (told, written) = tokio::sync::oneshot::channel();
        // On a thread of its own: whoever reads slowly must not keep us from being interrupted.
        std::thread::spawn(move || told.send(result::replay(&done)));
        let cancelled = Self::cancelled(&self.link, &mut self.stops);
        tokio::select! {
            written = written => {
                let ended = || Failure::new(Exit::Output, "the stored output could not be written");
                written.map_err(|_| ended())?.map(|code| Exit::Code(code).into())
            }
            by = cancelled => {
                let code = by.map_or(128 + 9, |signal| 128 + number(signal));
                Ok(End { code, by })
            }
        }
    }

    /// Opens the store and waits for the lock.
    async fn ask(
        args: &RunArgs,
        owner: &Owner,
        store: &Choice,
        link: &Ear,
        locks: &mut Option<LockManager>,
        deadlines: &Deadlines,
    ) -> Result<Got, NotGot> {
        let mut options = store.options().map_err(NotGot::Failed)?;
        options.owner = owner.clone();
        options.ttl = ttl(args);
        let locks = locks.insert(store.connect_with(options).await.map_err(NotGot::Failed)?);
        if let Some(lifeline) = locks.lifeline() {
            // Before there is anything to lose: it holds even while it is on its way.
            link.send(&ToFront::Lifeline, &[lifeline.as_fd()]);
        }
        let asked = Self::wait_for(args, locks, store);
        let got = if args.no_wait {
            asked.await
        } else {
            tokio::select! {
                biased;
                got = asked => got,
                () = waiting::show(locks, args, owner) => unreachable!("it never ends"),
            }
        };
        let (guard, slot) = match got? {
            Got::Lock(guard, slot) => (guard, slot),
            done @ Got::Done(_) => return Ok(done),
        };
        // A lease that was handed over is short until it is confirmed: too short to begin with.
        if Moment::now() >= deadlines.give_up_at(guard.valid_until()) {
            guard.extend(ttl(args).duration()).await.map_err(NotGot::Error)?;
        }
        Ok(Got::Lock(guard, slot))
    }

    /// The lock, GPUs, or a result, as the command line says.
    async fn wait_for(args: &RunArgs, locks: &LockManager, store: &Choice) -> Result<Got, NotGot> {
        let wait = if args.no_wait { Some(Duration::ZERO) } else { args.wait };
        if let Some(gpu) = &args.gpu {
            let scope = store.gpu_scope().map_err(NotGot::Failed)?;
            let request = gpu.request(locks, scope, args.gpus).map_err(NotGot::Failed)?.lock_timeout(ttl(args));
            let gpus = request.wait_up_to(wait.unwrap_or(Duration::MAX)).await;
            return gpus.map(|gpus| Got::Lock(gpus.into(), None)).map_err(NotGot::Error);
        }
        let Some(wish) = &args.once else {
            let name = args.name.as_ref().expect("the command line has a name, or GPUs");
            let request = locks.lock(name);
            let request = if let Some(wait) = wait { request.wait_up_to(wait) } else { request };
            return request.await.map(|guard| Got::Lock(guard.into(), None)).map_err(NotGot::Error);
        };
        let once = locks.once(wish.id.as_str()).keep(wish.keep.duration());
        let once = if let Some(wait) = wait { once.wait_up_to(wait) } else { once };
        Ok(match once.start().await.map_err(NotGot::Error)? {
            Started::Done(done) => Got::Done(done),
            Started::Run(running) => {
                let (guard, slot) = running.split();
                Got::Lock(guard.into(), Some(slot))
            }
        })
    }

    /// Waits until the front wants no lock any more: the signal that ends it, or none when it was killed.
    pub(super) async fn cancelled(link: &Ear, stops_told: &mut u32) -> Option<Signal> {
        loop {
            match link.hear().await {
                None => return None,
                Some(came) if stops(came.signal) => {
                    *stops_told += 1;
                    link.send(&ToFront::Stop(came.signal), &[]);
                }
                Some(came) if came.signal == Signal::SIGCONT => *stops_told = stops_told.saturating_sub(1),
                Some(came) if ends(came.signal) => return Some(came.signal),
                Some(_) => {}
            }
        }
    }

    /// Says why there is no lock. With `--json` that is data on stdout, and a signal ends the writing.
    async fn not_acquired(&mut self, why: NotGot) -> Result<End, Failure> {
        let error = match why {
            NotGot::Failed(failure) => return Err(failure),
            NotGot::Error(error) => error,
        };
        let failure = held::failure(error, self.locks.as_ref(), self.json, self.args.conflict_exit_code);
        tokio::select! {
            failure = failure => Err(failure),
            by = Self::cancelled(&self.link, &mut self.stops) => {
                let code = by.map_or(128 + 9, |signal| 128 + number(signal));
                Ok(End { code, by })
            }
        }
    }
}

//! What the engine takes from its surroundings, besides time: tasks and random numbers. Both come from the runtime and
//! the system; in a simulation, from its executor and its seed. Time is in [`clock`](crate::clock).

use tokio::runtime::Handle;

use crate::facts::Token;

/// Where tasks run, and where random numbers come from.
#[derive(Clone)]
pub(crate) enum Environment {
    Runtime(Handle),
    #[cfg(test)]
    Simulated(simulated::SimulatedEnvironment),
}

impl Environment {
    /// Returns the current runtime.
    pub(crate) fn current() -> Self {
        Self::Runtime(Handle::current())
    }

    /// Starts a task. After the end of the runtime this does nothing.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        match self {
            Self::Runtime(runtime) => drop(runtime.spawn(work)),
            #[cfg(test)]
            Self::Simulated(simulated) => simulated.spawn(Box::pin(work)),
        }
    }

    /// Runs work that blocks. `None`: it panicked, or the runtime has ended.
    pub(super) async fn run_blocking<R: Send + 'static>(&self, work: impl FnOnce() -> R + Send + 'static) -> Option<R> {
        match self {
            Self::Runtime(runtime) => runtime.spawn_blocking(work).await.ok(),
            #[cfg(test)]
            Self::Simulated(_) => Some(work()),
        }
    }

    /// Returns a token that no attempt has had before.
    pub(super) fn token(&self) -> Token {
        match self {
            Self::Runtime(_) => Token::random(),
            #[cfg(test)]
            Self::Simulated(simulated) => simulated.source().token(),
        }
    }

    /// Returns a random number below 256.
    pub(super) fn byte(&self) -> u32 {
        match self {
            Self::Runtime(_) => getrandom::u32().unwrap_or(0) % 256,
            #[cfg(test)]
            Self::Simulated(simulated) => simulated.source().byte(),
        }
    }
}

#[cfg(test)]
pub(crate) mod simulated {
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

    use futures_util::future::BoxFuture;
    use tokio::sync::mpsc::UnboundedSender;

    use crate::client::RandomSource;

    type Source = dyn RandomSource + Send;

    /// The environment of a simulated process.
    #[derive(Clone)]
    pub(crate) struct SimulatedEnvironment {
        tasks: UnboundedSender<BoxFuture<'static, ()>>,
        source: Arc<Mutex<Source>>,
    }

    impl SimulatedEnvironment {
        pub(crate) fn new(
            tasks: UnboundedSender<BoxFuture<'static, ()>>,
            source: impl RandomSource + Send + 'static,
        ) -> Self {
            Self { tasks, source: Arc::new(Mutex::new(source)) }
        }

        pub(super) fn spawn(&self, work: BoxFuture<'static, ()>) {
            // A process that has crashed runs no task any more.
            drop(self.tasks.send(work));
        }

        pub(super) fn source(&self) -> MutexGuard<'_, Source> {
            self.source.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};
    use std::time::Duration;

    use tokio::sync::mpsc::unbounded_channel;

    use super::simulated::SimulatedEnvironment;
    use super::*;
    use crate::client::RandomSource;
    use crate::clock::simulated::VirtualTime;
    use crate::clock::{Moment, sleep, timeout};

    struct Fixed;

    impl RandomSource for Fixed {
        fn token(&mut self) -> Token {
            Token::parse(&"t".repeat(Token::LEN)).expect("a token")
        }

        fn byte(&mut self) -> u32 {
            7
        }

        fn wall_ms(&mut self) -> u64 {
            0
        }
    }

    #[test]
    fn a_simulated_task_needs_no_runtime_and_sleeps_in_virtual_time() {
        let at = |ms| Moment::from_boot(Duration::from_millis(ms));
        let time = VirtualTime::start(at(1_000));
        let (tasks, mut started) = unbounded_channel();
        let environment = Environment::Simulated(SimulatedEnvironment::new(tasks, Fixed));
        environment.spawn(async {
            sleep(Duration::from_millis(5)).await;
            assert_eq!(timeout(Duration::from_millis(3), sleep(Duration::from_secs(1))).await, None);
        });
        let mut task = started.try_recv().expect("started");
        let mut cx = Context::from_waker(Waker::noop());
        for ms in [1_005, 1_008] {
            assert!(task.as_mut().poll(&mut cx).is_pending());
            assert_eq!(time.first_timer(), Some(at(ms)));
            time.fire();
            assert_eq!(Moment::now(), at(ms));
        }
        assert!(task.as_mut().poll(&mut cx).is_ready());
        assert_eq!((time.first_timer(), environment.byte()), (None, 7));
        drop(time);
        assert_ne!(Moment::now(), at(1_008));
    }
}

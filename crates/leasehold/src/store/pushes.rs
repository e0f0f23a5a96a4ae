//! The channel from a store to the one receiver of its messages in this process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc;

use super::Push;

/// Receives a store's messages on the task or thread that read them. It must not block, and must not call the store.
pub trait PushReceiver: Send + Sync + 'static {
    /// Takes one message.
    fn receive(&self, push: Push);

    /// Returns whether messages still have a receiver.
    fn is_open(&self) -> bool;
}

/// The sending end of a store. Messages are kept until a receiver is attached.
#[derive(Clone)]
pub(crate) struct PushSender(Arc<Mutex<PushState>>);

enum PushState {
    Kept(Vec<Push>),
    Attached(Arc<dyn PushReceiver>),
}

impl PushSender {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(PushState::Kept(Vec::new()))))
    }

    /// Sends one message. The caller must not hold a lock that the receiver may need.
    pub(crate) fn send(&self, push: Push) {
        let receiver = match &mut *self.state() {
            PushState::Kept(kept) => return kept.push(push),
            PushState::Attached(receiver) => receiver.clone(),
        };
        deliver(&*receiver, push);
    }

    /// Starts the delivery to this receiver. Only the first one counts.
    pub(crate) fn attach(&self, receiver: Arc<dyn PushReceiver>) {
        loop {
            let kept = {
                let mut state = self.state();
                let PushState::Kept(kept) = &mut *state else { return };
                if kept.is_empty() {
                    *state = PushState::Attached(receiver);
                    return;
                }
                std::mem::take(kept)
            };
            // Messages sent meanwhile are kept, so that they do not overtake these.
            kept.into_iter().for_each(|push| deliver(&*receiver, push));
        }
    }

    /// Returns whether messages have a receiver, or may get one.
    pub(crate) fn is_open(&self) -> bool {
        let receiver = match &*self.state() {
            PushState::Kept(_) => return true,
            PushState::Attached(receiver) => receiver.clone(),
        };
        receiver.is_open()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, PushState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Delivers one message. A panic must not end the task or thread of the store that read it.
fn deliver(receiver: &dyn PushReceiver, push: Push) {
    if catch_unwind(AssertUnwindSafe(|| receiver.receive(push))).is_err() {
        tracing::error!("a message of the store could not be delivered: its receiver panicked");
    }
}

/// A receiver that puts messages into a channel.
pub(super) struct Channel(pub(super) mpsc::UnboundedSender<Push>);

impl PushReceiver for Channel {
    fn receive(&self, push: Push) {
        // An error means that the channel's reader is gone.
        let _ = self.0.send(push);
    }

    fn is_open(&self) -> bool {
        !self.0.is_closed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_kept_until_there_is_a_receiver() {
        let sender = PushSender::new();
        sender.send(Push::Resync);
        assert!(sender.is_open());
        let (tell, mut told) = mpsc::unbounded_channel();
        sender.attach(Arc::new(Channel(tell)));
        sender.send(Push::Disconnected);
        assert_eq!([told.try_recv(), told.try_recv()], [Ok(Push::Resync), Ok(Push::Disconnected)]);
        drop(told);
        assert!(!sender.is_open());
    }

    /// Panics at a disconnect, and passes on the rest.
    struct Panics(Channel);

    impl PushReceiver for Panics {
        fn receive(&self, push: Push) {
            assert_ne!(push, Push::Disconnected, "a panic of the test");
            self.0.receive(push);
        }

        fn is_open(&self) -> bool {
            true
        }
    }

    #[test]
    fn a_panic_of_the_receiver_does_not_reach_the_sender() {
        let (tell, mut told) = mpsc::unbounded_channel();
        let sender = PushSender::new();
        sender.send(Push::Disconnected);
        sender.send(Push::Resync);
        sender.attach(Arc::new(Panics(Channel(tell))));
        sender.send(Push::Disconnected);
        sender.send(Push::Resync);
        assert_eq!([told.try_recv(), told.try_recv()], [Ok(Push::Resync), Ok(Push::Resync)]);
    }
}

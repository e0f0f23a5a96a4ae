//! A value whose changes tasks wait for. They are woken in the order in which they began to wait, so that a seed
//! replays.

use std::cell::{Cell, Ref, RefCell};

use tokio::sync::Notify;

pub(super) struct Watched<T> {
    value: RefCell<T>,
    version: Cell<u64>,
    changed: Notify,
}

impl<T> Watched<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value: RefCell::new(value), version: Cell::new(0), changed: Notify::new() }
    }

    pub(super) fn set(&self, value: T) {
        *self.value.borrow_mut() = value;
        self.version.set(self.version.get() + 1);
        self.changed.notify_waiters();
    }

    pub(super) fn get(&self) -> Ref<'_, T> {
        self.value.borrow()
    }

    pub(super) fn version(&self) -> u64 {
        self.version.get()
    }

    /// Waits until the value is newer than this version.
    pub(super) async fn newer_than(&self, version: u64) {
        loop {
            let changed = self.changed.notified();
            if self.version.get() > version {
                return;
            }
            changed.await;
        }
    }

    /// Waits until the value satisfies a condition.
    pub(super) async fn wait_for(&self, is_met: impl Fn(&T) -> bool) {
        loop {
            let changed = self.changed.notified();
            if is_met(&self.value.borrow()) {
                return;
            }
            changed.await;
        }
    }
}

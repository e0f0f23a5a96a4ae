//! Locks inside one process, for tests, documentation and simulation: the state machine behind a mutex.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::mpsc;

use super::on_machine::{self, Asking, MachineReply, RunMachine, view};
use super::*;
use crate::clock;
use crate::facts::{KeySpace, Namespace};
use crate::machine::{self, CallContext, InboxId, Limits, Lock};

mod bindings;

/// Locks that several [`MemoryStore`]s share. Each store represents one process.
#[derive(Clone, Default)]
pub struct MemoryWorld {
    world: Arc<Mutex<World>>,
    /// Locked while messages are delivered, so that each is received before any later operation is answered.
    delivery: Arc<Mutex<()>>,
}

#[derive(Default)]
struct World {
    /// Locks by key, as [`KeySpace`] makes it.
    locks: BTreeMap<String, Lock>,
    counter: u64,
    inboxes: HashMap<InboxId, PushSender>,
    /// Messages that have not been received yet, in order.
    outbox: VecDeque<(PushSender, Push)>,
    /// Followers, with the namespace whose events each receives.
    followers: Vec<(Namespace, mpsc::Sender<LockEvent>)>,
    /// Counters by namespace and name.
    counters: BTreeMap<(Namespace, &'static str), u64>,
    /// Bindings by key.
    bindings: BTreeMap<String, bindings::StoredBinding>,
    /// How long a grant lasts until it is confirmed, if a test has set it.
    provisional_ms: Option<u64>,
}

impl MemoryWorld {
    /// Creates an empty world.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens another store on this world, as another process would.
    pub fn open(&self) -> MemoryStore {
        self.open_with(KeySpace::default())
    }

    /// Opens another store on this world with a namespace and raw names.
    pub fn open_with(&self, keys: KeySpace) -> MemoryStore {
        let inbox = InboxId(Token::random().reveal().into());
        let pushes = PushSender::new();
        self.lock().inboxes.insert(inbox.clone(), pushes.clone());
        MemoryStore { world: self.clone(), keys, inbox, pushes }
    }

    /// Ends a lease as if its ttl had run out.
    #[cfg(any(test, feature = "test-hooks"))]
    #[doc(hidden)]
    pub fn expire(&self, name: &LockName) {
        let key = KeySpace::default().key(name).expect("a name with a key");
        if let Some(lock) = self.lock().locks.get_mut(&key) {
            lock.slot = crate::machine::Slot::Free;
        }
    }

    /// Sets how long a grant lasts until it is confirmed.
    #[cfg(any(test, feature = "test-hooks"))]
    #[doc(hidden)]
    pub fn set_provisional_ms(&self, ms: u64) {
        self.lock().provisional_ms = Some(ms);
    }

    /// Writes a value at a lock's key as another kind of client would.
    #[cfg(any(test, feature = "test-hooks"))]
    #[doc(hidden)]
    pub fn put_foreign(&self, name: &LockName, value: &str, ttl: std::time::Duration) {
        let ends_ms = Some(now_ms().saturating_add(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)));
        let slot = crate::machine::Slot::Foreign { value: value.to_owned(), ends_ms };
        let key = KeySpace::default().key(name).expect("a name with a key");
        self.lock().locks.entry(key).or_default().slot = slot;
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers all messages in order. The world is not locked meanwhile: a receiver may drop a store of it.
    fn deliver(&self) {
        let _delivery = self.delivery.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let Some((to, push)) = self.lock().outbox.front().cloned() else { return };
            // If the receiver is gone, the next waiter gets the lock when the provisional lease ends.
            to.send(push);
            self.lock().outbox.pop_front();
        }
    }
}

/// A store on a [`MemoryWorld`].
pub struct MemoryStore {
    world: MemoryWorld,
    keys: KeySpace,
    inbox: InboxId,
    pushes: PushSender,
}

impl MemoryStore {
    /// Creates a store with its own world.
    pub fn new() -> Self {
        MemoryWorld::new().open()
    }

    /// The state machine of one lock.
    fn machine(&self, name: &LockName) -> Result<MemoryMachine<'_>, StoreError> {
        Ok(MemoryMachine { store: self, key: self.keys.key(name)? })
    }
}

/// The state machine of one lock of a [`MemoryWorld`].
struct MemoryMachine<'a> {
    store: &'a MemoryStore,
    key: String,
}

impl RunMachine for MemoryMachine<'_> {
    type Error = StoreError;

    fn run<R>(
        &mut self,
        _me: Option<&Token>,
        verb: &mut dyn FnMut(&mut Lock, &mut CallContext<'_>) -> R,
    ) -> Result<MachineReply<R>, StoreError> {
        let mut guard = self.store.world.lock();
        let world = &mut *guard;
        let limits = Limits {
            provisional_ms: world.provisional_ms.unwrap_or(Limits::DEFAULT.provisional_ms),
            ..Limits::DEFAULT
        };
        let lock = world.locks.entry(self.key.clone()).or_default();
        let mut messages = Vec::new();
        let inboxes = &world.inboxes;
        let mut listening = |inbox: &InboxId| inboxes.get(inbox).is_some_and(PushSender::is_open);
        let mut cx = CallContext {
            now_ms: now_ms(),
            wall_us: clock::wall_us(),
            counter: &mut world.counter,
            listening: &mut listening,
            outbox: &mut messages,
            limits,
        };
        let now_ms = cx.now_ms;
        let reply = verb(lock, &mut cx);
        let holder = view(&lock.slot, now_ms);
        if lock.is_gone() {
            world.locks.remove(&self.key);
        }
        let asked_at = Moment::now();
        for (inbox, message) in messages {
            if let Some(to) = world.inboxes.get(&inbox) {
                world.outbox.push_back((to.clone(), message.into_push(asked_at)));
            }
        }
        let has_messages = !world.outbox.is_empty();
        drop(guard);
        if has_messages {
            self.store.world.deliver();
        }
        Ok(MachineReply { reply, holder })
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for MemoryStore {
    fn drop(&mut self) {
        self.world.lock().inboxes.remove(&self.inbox);
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Try, StoreError> {
        on_machine::try_acquire(self.machine(&request.name)?, &Asking::new(request, &self.inbox, Moment::now()))
    }

    async fn acquire(&self, request: &AcquireRequest, ticket: Option<Ticket>) -> Result<Acquire, StoreError> {
        on_machine::acquire(self.machine(&request.name)?, &Asking::new(request, &self.inbox, Moment::now()), ticket)
    }

    async fn ticket(&self) -> Result<Ticket, StoreError> {
        Ok(Ticket(machine::draw(&mut self.world.lock().counter, clock::wall_us())?))
    }

    async fn release(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        on_machine::release(self.machine(name)?, token)
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Renewed> {
        let renew = |r: &Renewal| self.machine(&r.name).and_then(|machine| on_machine::renew(machine, r));
        renewals.iter().map(|r| renew(r).unwrap_or_else(Renewed::Unknown)).collect()
    }

    async fn leave(&self, request: &AcquireRequest) -> Result<Left, StoreError> {
        on_machine::leave(self.machine(&request.name)?, &request.token)
    }

    async fn evict(&self, name: &LockName, holder: HolderId, mode: EvictMode) -> Result<Evicted, StoreError> {
        on_machine::evict(self.machine(name)?, holder, mode == EvictMode::Force)
    }

    async fn ask_to_finish(
        &self,
        name: &LockName,
        holder: HolderId,
        reason: &str,
    ) -> Result<FinishRequest, StoreError> {
        on_machine::ask_to_finish(self.machine(name)?, holder, reason)
    }

    fn deliver_to(&self, receiver: Arc<dyn PushReceiver>) {
        self.pushes.attach(receiver);
    }

    async fn note(&self, notes: Vec<Note>) -> Result<(), StoreError> {
        let mut world = self.world.lock();
        for note in notes {
            if let Note::Tell(event) = note {
                // The stream of a follower that is gone or does not keep up ends: locks never wait for a follower.
                world.followers.retain(|(namespace, follower)| {
                    !follower.is_closed()
                        && (namespace != self.keys.namespace() || follower.try_send(event.clone()).is_ok())
                });
            }
        }
        Ok(())
    }

    async fn count(&self, deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        let mut world = self.world.lock();
        for (name, delta) in deltas {
            *world.counters.entry((self.keys.namespace().clone(), name)).or_default() += delta;
        }
        Ok(())
    }
}

#[async_trait]
impl Inspect for MemoryStore {
    fn describe(&self) -> String {
        "memory:".into()
    }

    async fn holder(&self, name: &LockName) -> Result<Option<Holder>, StoreError> {
        let called = self.machine(name)?.run(None, &mut |lock, cx| {
            lock.lapse(cx.now_ms);
            lock.slot.inbox().map(|inbox| (cx.listening)(inbox))
        })?;
        Ok(called.holder.map(|holder| Holder { connected: called.reply, ..holder }))
    }

    async fn list(&self, prefix: &str, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        let mut world = self.world.lock();
        let now = now_ms();
        world.locks.values_mut().for_each(|lock| lock.lapse(now));
        let beyond = |key: &str| after.as_ref().is_none_or(|c| key > c.0.as_str());
        let listening = |inbox: &InboxId| world.inboxes.get(inbox).is_some_and(PushSender::is_open);
        let found = world.locks.iter().filter(|(key, _)| beyond(key)).filter_map(|(key, lock)| {
            let name = self.keys.name(key).filter(|name| name.as_str().starts_with(prefix))?;
            let connected = lock.slot.inbox().map(listening);
            Some((key, (name, Holder { connected, ..view(&lock.slot, now)? })))
        });
        let mut found: Vec<_> = found.take(limit + 1).collect();
        let more = found.len() > limit;
        found.truncate(limit);
        let next = found.last().filter(|_| more).map(|(key, _)| Cursor((*key).clone()));
        Ok(Page { locks: found.into_iter().map(|(_, lock)| lock).collect(), next })
    }

    async fn queue(&self, name: &LockName) -> Result<Vec<Waiter>, StoreError> {
        let mut world = self.world.lock();
        let Some(lock) = world.locks.get_mut(&self.keys.key(name)?) else { return Ok(Vec::new()) };
        lock.lapse(now_ms());
        let waiter = |w: &crate::machine::QueueEntry| Waiter {
            ticket: Ticket(w.ticket),
            owner: w.owner.clone(),
            since_ms: w.since_ms,
            listens: w.inbox.is_some(),
        };
        Ok(lock.queue.iter().map(waiter).collect())
    }

    async fn long_held(&self, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        self.list("", after, limit).await
    }

    async fn counters(&self) -> Result<Vec<(String, u64)>, StoreError> {
        let world = self.world.lock();
        let ours = world.counters.iter().filter(|((ns, _), _)| ns == self.keys.namespace());
        Ok(ours.map(|((_, name), count)| ((*name).to_owned(), *count)).collect())
    }

    async fn checkup(&self) -> Vec<Finding> {
        vec![Finding::warn("reach", "only this process sees these locks; for several processes use sqlite: or redis:")]
    }

    async fn follow(&self) -> Result<mpsc::Receiver<LockEvent>, StoreError> {
        let (sender, events) = mpsc::channel(1_024);
        self.world.lock().followers.push((self.keys.namespace().clone(), sender));
        Ok(events)
    }
}

/// The boot clock in milliseconds, which leases end by.
fn now_ms() -> u64 {
    u64::try_from(Moment::now().since_boot().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// Reports each message, then waits until the test lets it go on.
    struct Slow(SyncSender<Push>, Mutex<Receiver<()>>);

    impl PushReceiver for Slow {
        fn receive(&self, push: Push) {
            self.0.send(push).expect("the test listens");
            self.1.lock().expect("no panic meanwhile").recv().expect("the test goes on");
        }

        fn is_open(&self) -> bool {
            true
        }
    }

    fn request(token: Token) -> AcquireRequest {
        AcquireRequest {
            name: LockName::new("a").expect("a name"),
            token,
            ttl: Ttl::new(Duration::from_secs(60)).expect("a ttl"),
            owner: Owner::default(),
            fenced: true,
            listens: true,
            since_ms: 1,
        }
    }

    #[test]
    fn a_message_is_received_before_a_later_request_is_answered() {
        let wait = |store: &MemoryStore, request: &AcquireRequest| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            runtime.block_on(store.acquire(request, None)).expect("an answer")
        };
        let world = MemoryWorld::new();
        let (holder, slow, other) = (world.open(), world.open(), world.open());
        let [first, second, third] = [(); 3].map(|()| request(Token::random()));
        assert!(matches!(wait(&holder, &first), Acquire::Granted(_)));
        assert!(matches!(wait(&slow, &second), Acquire::Queued(_)));
        assert!(matches!(wait(&other, &third), Acquire::Queued(_)));
        let (reports, received) = sync_channel(0);
        let (go_on, goes) = sync_channel(0);
        slow.deliver_to(Arc::new(Slow(reports, Mutex::new(goes))));
        let mut pushes = other.pushes();
        thread::scope(|threads| {
            // The lock goes to the slow process, and a message to the one that is next.
            threads.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
                runtime.block_on(holder.release(&first.name, &first.token)).expect("an answer")
            });
            received.recv().expect("the grant");
            let (other, third) = (&other, &third);
            let asks = threads.spawn(move || {
                let answer = wait(other, third);
                assert!(matches!(answer, Acquire::Queued(_)));
                pushes.try_recv()
            });
            thread::sleep(Duration::from_millis(50));
            go_on.send(()).expect("it waits");
            assert!(matches!(asks.join().expect("no panic"), Ok(Push::LookAgain { .. })), "received before the answer");
        });
    }
}

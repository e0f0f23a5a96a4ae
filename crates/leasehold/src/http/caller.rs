//! Hashes callers into names with a key that all instances share, so that a caller cannot be found from a name by guessing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::clock::Moment;
use crate::engine::Core;
use crate::error::Error;
use crate::facts::{BindingKind, ClaimId, LockName, Retention};
use crate::store::{BindingId, Change, Create, Expected, NewBinding, Operation};

/// The id of the shared key in the store.
const KEY_ID: &str = "idempotency";
const KEY_BYTES: usize = 32;
/// The length of the hash in a name, long enough that two callers never have the same one.
const HASH_BYTES: usize = 16;
/// How often an instance checks that the store still has the key. After a FLUSHALL a new instance may create another key, and
/// until the check the two instances do not see each other's records.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(10);
/// How often an instance extends the retention of the key.
const EXTEND_INTERVAL: Duration = Duration::from_secs(60 * 60);

/// Hashes callers with a key that the first instance creates in the store.
#[derive(Clone)]
pub(super) struct CallerHash {
    key: Arc<Mutex<SharedKey>>,
}

#[derive(Clone)]
struct SharedKey {
    /// The key that this instance offers to the store. Once the store's key is known, it is that one, so that a store that lost
    /// its key gets the same key again.
    offered: NewBinding,
    confirmed: Option<Moment>,
    extended: Option<Moment>,
}

impl CallerHash {
    pub(super) fn new() -> Self {
        let mut key = vec![0; KEY_BYTES];
        getrandom::fill(&mut key).expect("the operating system returns random bytes");
        let id = BindingId { kind: BindingKind::Secrets, id: LockName::new(KEY_ID).expect("a name") };
        let keep = Retention::new(Retention::MAX).expect("the longest retention");
        let offered = NewBinding { id, claim: ClaimId::random(), keep, slot: None, value: key };
        Self { key: Arc::new(Mutex::new(SharedKey { offered, confirmed: None, extended: None })) }
    }

    /// Returns the hash of a caller, in hex. It is the same on every instance.
    pub(super) async fn of(&self, core: &Core, caller: &[u8]) -> Result<String, Error> {
        let mut key = self.known().clone();
        let now = Moment::now();
        if is_due(key.confirmed, CONFIRM_INTERVAL, now) {
            // Concurrent requests all ask, with the same offer, so that none waits for another one's request to a store that
            // does not answer.
            key.confirm(core, now).await?;
            key.confirmed = Some(now);
            self.known().clone_from(&key);
        }
        let hash = hmac(&key.offered.value, caller);
        Ok(hash[..HASH_BYTES].iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn known(&self) -> MutexGuard<'_, SharedKey> {
        self.key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedKey {
    /// Creates the key in the store, or adopts the existing one.
    async fn confirm(&mut self, core: &Core, now: Moment) -> Result<(), Error> {
        let id = &self.offered.id;
        // Without a reply nothing is undone: another instance may already have read the key. The same key is offered again.
        let answer = core.within(core.store.create(&self.offered)).await;
        if let Create::Exists(found) = answer.map_err(|error| core.store_error(Operation::Create, &id.id, error))? {
            if found.value.len() != KEY_BYTES {
                let problem = format!("a key of {KEY_BYTES} bytes was expected");
                return Err(Error::Unreadable { name: id.id.clone(), problem });
            }
            (self.offered.claim, self.offered.value) = (found.claim, found.value);
        }
        if is_due(self.extended, EXTEND_INTERVAL, now) {
            self.extend(core).await?;
            self.extended = Some(now);
        }
        Ok(())
    }

    async fn extend(&self, core: &Core) -> Result<(), Error> {
        let NewBinding { id, claim, keep, value, .. } = &self.offered;
        let change = Change { value: value.clone(), keep: Some(*keep), give_slot_back: false };
        core.change(id, &Expected::Claim(claim.clone()), &change).await.map(drop)
    }
}

fn is_due(last: Option<Moment>, every: Duration, now: Moment) -> bool {
    last.is_none_or(|last| last.until(now) >= every)
}

/// HMAC-SHA-256 (RFC 2104) with a key of at most one block. It uses only `sha2`, which is pure Rust; `ring` would require a
/// C compiler.
fn hmac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let padded = |pad: u8| {
        let mut block = [pad; 64];
        block.iter_mut().zip(key).for_each(|(byte, key)| *byte ^= key);
        block
    };
    let inner = Sha256::new().chain_update(padded(0x36)).chain_update(message).finalize();
    Sha256::new().chain_update(padded(0x5c)).chain_update(inner).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::LockManager;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The first two test cases of RFC 4231.
    #[test]
    fn hmac_matches_rfc_4231() {
        let first = hmac(&[0x0b; 20], b"Hi There");
        assert_eq!(hex(&first), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
        let second = hmac(b"Jefe", b"what do ya want for nothing?");
        assert_eq!(hex(&second), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[tokio::test]
    async fn instances_share_the_key_and_restore_it_in_a_store_that_lost_it() {
        let locks = LockManager::connect("memory:").await.expect("memory");
        let core = locks.core();
        let (one, other) = (CallerHash::new(), CallerHash::new());
        let hash = one.of(core, b"alice").await.expect("answered");
        assert_eq!(other.of(core, b"alice").await.expect("answered"), hash);
        assert_ne!(one.of(core, b"bob").await.expect("answered"), hash);
        let elsewhere = LockManager::connect("memory:").await.expect("memory");
        assert_ne!(CallerHash::new().of(elsewhere.core(), b"alice").await.expect("answered"), hash, "a key per store");
        // The store loses the key; an instance that knows it checks before a new instance starts.
        let (id, claim) = {
            let key = other.known();
            (key.offered.id.clone(), key.offered.claim.clone())
        };
        assert!(core.remove(&id, &claim).await.expect("answered"));
        other.known().confirmed = None;
        assert_eq!(other.of(core, b"alice").await.expect("answered"), hash);
        assert_eq!(CallerHash::new().of(core, b"alice").await.expect("answered"), hash);
    }

    #[tokio::test]
    async fn an_instance_adopts_a_new_key_soon_after_the_store_lost_the_old_one() {
        let locks = LockManager::connect("memory:").await.expect("memory");
        let core = locks.core();
        let (one, other) = (CallerHash::new(), CallerHash::new());
        let before = one.of(core, b"alice").await.expect("answered");
        let (id, claim) = {
            let key = one.known();
            (key.offered.id.clone(), key.offered.claim.clone())
        };
        assert!(core.remove(&id, &claim).await.expect("answered"));
        let hash = other.of(core, b"alice").await.expect("answered");
        assert_ne!(hash, before, "a new instance created another key");
        let confirmed = one.known().confirmed.expect("confirmed");
        one.known().confirmed = Some(confirmed - Duration::from_secs(10));
        assert_eq!(one.of(core, b"alice").await.expect("answered"), hash);
    }
}

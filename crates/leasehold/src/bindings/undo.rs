//! Removes bindings that may have been created for a caller that no longer waits.

use std::sync::Arc;
use std::time::Duration;

use crate::backoff::Backoff;
use crate::engine::Core;
use crate::facts::ClaimId;
use crate::store::BindingId;

/// The number of attempts to remove a binding, and the pauses between them. After the last one, the end of its lease removes it.
const ATTEMPTS: u32 = 6;
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(4));

/// Removes a claim's binding in the background when it is dropped.
pub(crate) struct BindingUndo {
    core: Arc<Core>,
    id: BindingId,
    claim: Option<ClaimId>,
}

impl BindingUndo {
    pub(crate) fn arm(core: Arc<Core>, id: BindingId, claim: ClaimId) -> Self {
        Self { core, id, claim: Some(claim) }
    }

    /// Keeps the binding.
    pub(crate) fn disarm(&mut self) -> Option<ClaimId> {
        self.claim.take()
    }
}

impl Drop for BindingUndo {
    fn drop(&mut self) {
        let Some(claim) = self.claim.take() else { return };
        let (core, id) = (self.core.clone(), self.id.clone());
        self.core.spawn(async move {
            let mut backoff = BACKOFF;
            for _ in 0..ATTEMPTS {
                match core.within(core.store.remove(&id, &claim)).await {
                    Ok(_) => return,
                    Err(error) if !error.is_passing() => {
                        tracing::warn!(id = %id.id, %claim, error = %format_args!("{error:#}"), "the binding could not be removed; it ends with its lease");
                        return;
                    }
                    Err(_) => tokio::time::sleep(backoff.pause()).await,
                }
            }
            tracing::warn!(id = %id.id, %claim, "the store is unreachable; the binding ends with its lease");
        });
    }
}

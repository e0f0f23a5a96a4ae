//! Bindings of a job dispatcher: the job of a request, its node, and whether the job was sent there.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Binding, BindingUndo, Bindings, binding, binding_id, change};
use crate::error::Error;
use crate::facts::{ClaimId, Invalid};
use crate::store::{Changed, Create, Expected, NodeSlot};

/// The job that a request became.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobBinding {
    /// The id of the job.
    pub job_id: String,
    /// The node on which the job is to run.
    #[serde(default)]
    pub node_id: Option<String>,
    /// Whether the job was sent to its node.
    #[serde(default, alias = "dispatched_to_node")]
    pub dispatched: bool,
}

impl JobBinding {
    /// Creates a binding for a job that was not sent yet.
    pub fn new(job_id: impl Into<String>) -> Self {
        Self { job_id: job_id.into(), node_id: None, dispatched: false }
    }

    /// Sets the node.
    pub fn on(mut self, node_id: impl Into<String>) -> Self {
        self.node_id = Some(node_id.into());
        self
    }
}

/// The result of [`Bindings::try_create_on_node`].
#[derive(Debug)]
pub enum Reserved {
    /// The binding and the slot are new. Create the job, then call [`keep`](Reservation::keep).
    Created(Reservation),
    /// The request already has a job. No slot was taken.
    Exists(Binding<JobBinding>),
    /// The node has no free slot. Nothing was created; try another node.
    NodeFull,
}

/// A new binding and its slot. Dropping it without [`keep`](Self::keep) removes both in the background, so that a job whose
/// creation failed blocks neither its request nor its node.
#[must_use = "dropping the reservation removes the binding and frees its slot"]
pub struct Reservation {
    undo: BindingUndo,
    claim: ClaimId,
}

impl Reservation {
    /// Keeps the binding and the slot, after the job was created. They last until their lease ends or they are removed.
    pub fn keep(mut self) -> ClaimId {
        self.undo.disarm();
        self.claim.clone()
    }

    /// Returns the claim id of the binding.
    pub fn claim(&self) -> &ClaimId {
        &self.claim
    }
}

impl std::fmt::Debug for Reservation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reservation").field("claim", &self.claim).finish_non_exhaustive()
    }
}

impl Bindings<JobBinding> {
    /// Binds a job to a request id and takes one of `slots` slots of its node, both in one atomic step. The slot is taken
    /// until the binding ends or [`give_slot_back`](Self::give_slot_back) is called.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::bindings::{JobBinding, Reserved};
    /// use leasehold::LockManager;
    ///
    /// # let locks = LockManager::connect("memory:").await?;
    /// let jobs = locks.bindings::<JobBinding>();
    /// let (job, lease) = (JobBinding::new("job-1").on("gpu-a"), Duration::from_secs(30));
    /// match jobs.try_create_on_node("req-1", &job, 4, lease).await? {
    ///     Reserved::Created(reservation) => {
    ///         // … create the job; an early return with `?` removes the binding and frees the slot …
    ///         reservation.keep();
    ///         jobs.mark_dispatched("req-1").await?;
    ///     }
    ///     Reserved::Exists(binding) => println!("the job is {}", binding.value.job_id),
    ///     Reserved::NodeFull => println!("try another node"),
    /// }
    /// # assert!(jobs.get("req-1").await?.expect("kept").value.dispatched);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`try_create`](Self::try_create); [`Error::Invalid`] for a job without a node, or zero slots.
    ///
    /// # Cancel safety
    /// As [`try_create`](Self::try_create).
    pub async fn try_create_on_node(
        &self,
        request_id: impl AsRef<str>,
        job: &JobBinding,
        slots: u32,
        lease: Duration,
    ) -> Result<Reserved, Error> {
        let (id, claim) = (binding_id(request_id)?, ClaimId::random());
        let wrong = |problem| Invalid::Id { what: "node id", problem };
        let node = job.node_id.as_deref().ok_or_else(|| wrong("is missing: a slot belongs to a node"))?;
        let node = super::request_id(node).map_err(|_| wrong("is empty, too long or has control characters"))?;
        if slots == 0 {
            let given = slots.to_string();
            return Err(
                Invalid::Setting { setting: "slots of a node", given, problem: "must be at least 1".into() }.into()
            );
        }
        // From here to `keep`, only the reservation's undo removes the binding.
        let slot = Some(NodeSlot { node, of: slots });
        match self.create(&id, &claim, job, lease, slot).await? {
            Create::Created => {
                let undo = BindingUndo::arm(self.core.clone(), id, claim.clone());
                Ok(Reserved::Created(Reservation { undo, claim }))
            }
            Create::Exists(bound) => Ok(Reserved::Exists(binding(&id.id, bound, None)?)),
            Create::NoSlot => Ok(Reserved::NodeFull),
        }
    }

    /// Records that the job was sent to its node, and returns the binding; `None` when there is none. The end of its lease does
    /// not change. The call can be repeated.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; [`Error::Unreadable`].
    pub async fn mark_dispatched(&self, request_id: impl AsRef<str>) -> Result<Option<Binding<JobBinding>>, Error> {
        self.modify(request_id, |job| job.dispatched = true).await
    }

    /// Frees the slot of a finished job. The binding stays. Returns `false` when the binding is gone or belongs to another
    /// claim.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; [`Error::Unreadable`].
    pub async fn give_slot_back(&self, request_id: impl AsRef<str>, claim: &ClaimId) -> Result<bool, Error> {
        let id = binding_id(request_id)?;
        loop {
            let Some((bound, _)) = self.core.read(&id).await? else { return Ok(false) };
            if bound.claim != *claim {
                return Ok(false);
            }
            let expected = Expected::Unchanged(bound.claim.clone(), bound.revision);
            let found: Binding<JobBinding> = binding(&id.id, bound, None)?;
            let mut change = change(&id.id, &found.value, None)?;
            change.give_slot_back = true;
            match self.core.change(&id, &expected, &change).await? {
                Changed::Done => return Ok(true),
                Changed::Gone => return Ok(false),
                Changed::Other(_) => {}
            }
        }
    }
}

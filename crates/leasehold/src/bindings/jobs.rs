//! The binding of a job dispatcher: which job a request became, on which node, and whether it was sent.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Binding, BindingUndo, Bindings, binding, binding_id, change};
use crate::error::Error;
use crate::facts::{ClaimId, Invalid};
use crate::store::{Changed, Create, Expected, NodeSlot};

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobBinding {
    /// The job it became.
    pub job_id: String,
    /// The node that job is for.
    #[serde(default)]
    pub node_id: Option<String>,
    /// Whether it was sent there.
    #[serde(default, alias = "dispatched_to_node")]
    pub dispatched: bool,
}

impl JobBinding {
    /// A job that was not sent anywhere yet.
    pub fn new(job_id: impl Into<String>) -> Self {
        Self { job_id: job_id.into(), node_id: None, dispatched: false }
    }

    /// For this node.
    pub fn on(mut self, node_id: impl Into<String>) -> Self {
        self.node_id = Some(node_id.into());
        self
    }
}

/// The answer to [`Bindings::try_create_on_node`].
#[derive(Debug)]
pub enum Reserved {
    /// We were the first, and the node has a slot for the job. Create it, then [`keep`](Reservation::keep).
    Created(Reservation),
    /// The request has a job already; no slot was taken.
    Exists(Binding<JobBinding>),
    /// The node has no slot left; nothing was created. Try another node.
    NodeFull,
}

/// A binding and a slot that are ours, until kept: dropped, both are given back in the background, so that
/// a job whose creation failed blocks neither its request nor its node.
#[must_use = "dropped, the binding and its slot are given back"]
pub struct Reservation {
    undo: BindingUndo,
    claim: ClaimId,
}

impl Reservation {
    /// The job was created: the binding and its slot stay, until their lease is over, or they are removed
    /// or given back.
    pub fn keep(mut self) -> ClaimId {
        self.undo.disarm();
        self.claim.clone()
    }

    /// The id of our claim.
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
    /// As [`try_create`](Self::try_create), and takes one of so many slots of the job's node in the same
    /// atomic step: never one without the other. The slot lives as long as the binding, or until
    /// [`give_slot_back`](Self::give_slot_back).
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
    ///         // … create the job; `?` on the way gives binding and slot back …
    ///         reservation.keep();
    ///         jobs.mark_dispatched("req-1").await?;
    ///     }
    ///     Reserved::Exists(binding) => println!("it is {} already", binding.value.job_id),
    ///     Reserved::NodeFull => println!("try another node"),
    /// }
    /// # assert!(jobs.get("req-1").await?.expect("kept").value.dispatched);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`try_create`](Self::try_create); [`Error::Invalid`] for a job without a node, or no slots at all.
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
        let node = job.node_id.as_deref().ok_or_else(|| wrong("is missing: a slot is on a node"))?;
        let node = super::request_id(node).map_err(|_| wrong("is empty, too long or has control characters"))?;
        if slots == 0 {
            let given = slots.to_string();
            return Err(
                Invalid::Setting { setting: "slots of a node", given, problem: "must be 1 at least".into() }.into()
            );
        }
        // Armed all the way: from here to `keep` nobody else gives it back.
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

    /// Notes that the job was sent to its node; its lease stays. Returns what is bound now; `None` when the
    /// request has no job (any more). Doing it twice does no harm.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, [`Error::Unreadable`].
    pub async fn mark_dispatched(&self, request_id: impl AsRef<str>) -> Result<Option<Binding<JobBinding>>, Error> {
        self.modify(request_id, |job| job.dispatched = true).await
    }

    /// The job is over: its slot is free for another one, while the binding goes on telling which job it
    /// was. `false`: the binding is gone or somebody else's.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, [`Error::Unreadable`].
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

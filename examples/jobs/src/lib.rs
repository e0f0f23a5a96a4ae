//! A request becomes one job, even if it reaches several instances of this service several times.
//!
//! ```text
//! cargo run --release -p jobs
//! curl -X PUT localhost:3000/requests/r1 & curl -X PUT localhost:3000/requests/r1
//! ```
//!
//! Both responses have the same job, one with 201 and the other with 200. `docs/create-it-once.md` explains it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{post, put};
use axum::{Json, Router};
use leasehold::bindings::{Bindings, JobBinding, Reserved};
use leasehold::http::IdempotencyLayer;
use leasehold::{Error, LockManager};
use serde::Serialize;

/// How long the job of a request is known, longer than clients retry.
const LEASE: Duration = Duration::from_secs(600);
/// The number of jobs that a node runs at once.
const SLOTS: u32 = 2;
const NODES: [&str; 2] = ["node-a", "node-b"];

/// Sends a job to its node; `Err` if the node does not accept it.
pub type Send = Arc<
    dyn Fn(String) -> Pin<Box<dyn Future<Output = Result<(), String>> + std::marker::Send>> + std::marker::Send + Sync,
>;

/// The state of the handlers.
#[derive(Clone)]
pub struct Dispatcher {
    jobs: Bindings<JobBinding>,
    locks: LockManager,
    send: Send,
    transfers: Arc<AtomicU64>,
}

/// The body of a response.
#[derive(Debug, Serialize)]
struct JobReply {
    job_id: String,
    node_id: Option<String>,
    dispatched: bool,
}

impl Dispatcher {
    /// Creates a dispatcher with these locks and this function to send jobs.
    pub fn new(locks: LockManager, send: Send) -> Self {
        Self { jobs: locks.bindings(), locks, send, transfers: Arc::default() }
    }

    /// Returns its routes.
    pub fn routes(self) -> Router {
        let once = IdempotencyLayer::new(self.locks.clone()).per_header("x-tenant").required(true);
        let transfers = Router::new().route("/transfers", post(transfer)).layer(once);
        Router::new().route("/requests/{request_id}", put(create).get(show)).merge(transfers).with_state(self)
    }

    /// Returns the job of a request. It is created on the first node with a free slot, unless it exists.
    async fn job_of(&self, request_id: &str) -> Result<(StatusCode, JobBinding), Failed> {
        for node in NODES {
            let job = JobBinding::new(format!("job-of-{request_id}-on-{node}")).on(node);
            match self.jobs.try_create_on_node(request_id, &job, SLOTS, LEASE).await? {
                // Another call was first, here or on another instance. Its job is the result.
                Reserved::Exists(found) => return Ok((StatusCode::OK, found.value)),
                Reserved::NodeFull => {}
                Reserved::Created(reservation) => {
                    // If this fails, or is dropped because the client disconnected, the binding is removed and its slot freed.
                    (self.send)(job.job_id.clone()).await.map_err(Failed::Node)?;
                    reservation.keep();
                    let marked = self.jobs.mark_dispatched(request_id).await?;
                    return Ok((StatusCode::CREATED, marked.map_or(job, |found| found.value)));
                }
            }
        }
        Err(Failed::Full)
    }
}

/// Why no job was created.
enum Failed {
    Locks(Error),
    Node(String),
    Full,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Locks(error)
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        match self {
            Self::Locks(error) => error.into_response(),
            Self::Node(why) => (StatusCode::BAD_GATEWAY, why).into_response(),
            Self::Full => (StatusCode::SERVICE_UNAVAILABLE, "every node is busy; try again later").into_response(),
        }
    }
}

async fn create(State(here): State<Dispatcher>, Path(request_id): Path<String>) -> Result<Response, Failed> {
    let (status, job) = here.job_of(&request_id).await?;
    Ok((status, Json(reply(job))).into_response())
}

async fn show(State(here): State<Dispatcher>, Path(request_id): Path<String>) -> Result<Response, Failed> {
    Ok(match here.jobs.get(&request_id).await? {
        Some(found) => Json(reply(found.value)).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    })
}

/// Called once per `Idempotency-Key`. The layer does that, so nothing of it is visible here.
async fn transfer(State(here): State<Dispatcher>, body: String) -> Result<String, Failed> {
    (here.send)(body.clone()).await.map_err(Failed::Node)?;
    let number = here.transfers.fetch_add(1, Ordering::SeqCst) + 1;
    Ok(format!("transfer {number}: {body}\n"))
}

fn reply(job: JobBinding) -> JobReply {
    JobReply { job_id: job.job_id, node_id: job.node_id, dispatched: job.dispatched }
}

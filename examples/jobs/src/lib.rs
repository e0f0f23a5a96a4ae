//! A request becomes one job, however many instances of this service it reaches, and however often.
//!
//! ```text
//! cargo run --release -p jobs
//! curl -X PUT localhost:3000/requests/r1 & curl -X PUT localhost:3000/requests/r1
//! ```
//!
//! Both are answered with the same job: one with 201, the other with 200. `docs/create-it-once.md` walks
//! through it.

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

/// How long a request's job is known: longer than anybody asks again.
const LEASE: Duration = Duration::from_secs(600);
/// Jobs a node takes at once.
const SLOTS: u32 = 2;
const NODES: [&str; 2] = ["node-a", "node-b"];

/// Sends a job to its node; `Err` when the node does not take it.
pub type Send = Arc<
    dyn Fn(String) -> Pin<Box<dyn Future<Output = Result<(), String>> + std::marker::Send>> + std::marker::Send + Sync,
>;

/// What every handler has at hand.
#[derive(Clone)]
pub struct Dispatcher {
    jobs: Bindings<JobBinding>,
    locks: LockManager,
    send: Send,
    transfers: Arc<AtomicU64>,
}

/// What a caller is told.
#[derive(Debug, Serialize)]
struct Told {
    job_id: String,
    node_id: Option<String>,
    dispatched: bool,
}

impl Dispatcher {
    /// A dispatcher with these locks, that sends jobs like this.
    pub fn new(locks: LockManager, send: Send) -> Self {
        Self { jobs: locks.bindings(), locks, send, transfers: Arc::default() }
    }

    /// Its routes.
    pub fn routes(self) -> Router {
        let once = IdempotencyLayer::new(self.locks.clone()).per_header("x-tenant").required(true);
        let transfers = Router::new().route("/transfers", post(transfer)).layer(once);
        Router::new().route("/requests/{request_id}", put(create).get(show)).merge(transfers).with_state(self)
    }

    /// The job of a request: created now, on the first node that has a slot, or before.
    async fn job_of(&self, request_id: &str) -> Result<(StatusCode, JobBinding), Failed> {
        for node in NODES {
            let job = JobBinding::new(format!("job-of-{request_id}-on-{node}")).on(node);
            match self.jobs.try_create_on_node(request_id, &job, SLOTS, LEASE).await? {
                // Somebody was first, here or on another instance: their job is ours.
                Reserved::Exists(found) => return Ok((StatusCode::OK, found.value)),
                Reserved::NodeFull => {}
                Reserved::Created(reservation) => {
                    // Fails, or is dropped with a client that went away: binding and slot are given back.
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

/// Why there is no job.
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
    Ok((status, Json(told(job))).into_response())
}

async fn show(State(here): State<Dispatcher>, Path(request_id): Path<String>) -> Result<Response, Failed> {
    Ok(match here.jobs.get(&request_id).await? {
        Some(found) => Json(told(found.value)).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    })
}

/// Called once per `Idempotency-Key`: nothing of that is seen here.
async fn transfer(State(here): State<Dispatcher>, body: String) -> Result<String, Failed> {
    (here.send)(body.clone()).await.map_err(Failed::Node)?;
    let number = here.transfers.fetch_add(1, Ordering::SeqCst) + 1;
    Ok(format!("transfer {number}: {body}\n"))
}

fn told(job: JobBinding) -> Told {
    Told { job_id: job.job_id, node_id: job.node_id, dispatched: job.dispatched }
}

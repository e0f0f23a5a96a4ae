//! The journal of this machine: operations that could not be finished, and a route for operators to settle them.

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::{Extension, Json};
use leasehold::inspect::{Journal, JournalEntry, JournalKind};
use serde::{Deserialize, Serialize};

use crate::App;
use crate::audit::AuditLine;
use crate::caller::Caller;
use crate::extract::{JsonBody, path_param, validate_reason};
use crate::problem::{Problem, ProblemBody};

/// The most entries in one response. A longer journal is better inspected on its machine.
const MAX_ENTRIES: usize = 1_000;

/// The open entries of the journal.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct JournalPage {
    /// Unsettled entries, oldest first, at most 1000.
    entries: Vec<JournalEntryView>,
}

/// One operation that could not be finished. It never includes the token.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct JournalEntryView {
    /// The id of the entry.
    id: String,
    /// `unreleased`: a lock could not be released; `unprotected`: work ran without a lock.
    #[schema(value_type = String, example = "unreleased")]
    kind: JournalKind,
    /// The name of the lock.
    name: String,
    /// The store, without credentials.
    store: String,
    /// The namespace of the lock.
    namespace: String,
    /// The holder, for people.
    owner: String,
    /// The id of the holder.
    holder_id: String,
    /// The fence of the lease, if it had one.
    fence: Option<u64>,
    /// The TTL of the lease. The store drops the lease once it has passed.
    ttl_ms: u64,
    /// When the entry was written, in wall-clock milliseconds.
    at_ms: u64,
    /// The cause.
    why: String,
}

impl From<JournalEntry> for JournalEntryView {
    fn from(entry: JournalEntry) -> Self {
        let JournalEntry { id, kind, name, store, namespace, owner, holder_id, fence, ttl_ms, at_ms, why, .. } = entry;
        Self { id, kind, name, store, namespace, owner, holder_id, fence, ttl_ms, at_ms, why }
    }
}

/// A request to settle a journal entry.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settle {
    /// The reason, for the audit: 1 to 500 bytes.
    #[schema(min_length = 1, max_length = 500)]
    reason: String,
}

/// The `{id}` of a journal entry in the path.
pub(crate) struct EntryId(String);

impl<S: Send + Sync> FromRequestParts<S> for EntryId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        Ok(Self(path_param(parts, state).await?))
    }
}

/// List the journal of this machine
///
/// The journal belongs to the machine and user this server runs as. It contains releases that failed, which are retried
/// when the store is back, and work that ran without a lock.
#[utoipa::path(get, path = "/api/v1/journal", tag = "journal", responses((status = 200, body = JournalPage)))]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<JournalPage>, Problem> {
    let entries = entries(&app).await?;
    Ok(Json(JournalPage { entries: entries.into_iter().take(MAX_ENTRIES).map(Into::into).collect() }))
}

/// Settle a journal entry without doing anything else
///
/// For problems that a person has resolved. Returns the entry that was removed.
#[utoipa::path(post, path = "/api/v1/journal/{id}/settle", tag = "journal", request_body = Settle,
    params(("id" = String, Path, description = "the entry")),
    responses((status = 200, body = JournalEntryView), (status = 400, body = ProblemBody),
        (status = 404, description = "`no_such_entry`: the journal does not have this entry (any more)", body = ProblemBody)))]
pub(crate) async fn settle(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    EntryId(id): EntryId,
    JsonBody(request): JsonBody<Settle>,
) -> Result<Json<JournalEntryView>, Problem> {
    let reason = validate_reason(&request.reason)?;
    let none = || {
        let text = "the journal does not have this entry (any more); list it again";
        Problem::new(StatusCode::NOT_FOUND, "no_such_entry", text)
    };
    let entry = entries(&app).await?.into_iter().find(|entry| entry.id == id).ok_or_else(none)?;
    let write = |outcome: &str| {
        let line = AuditLine {
            outcome,
            action: "settle",
            name: &entry.name,
            reason,
            who: caller.who(),
            key_id: caller.key.as_ref().map(|key| key.id.as_str()),
            holder_id: &entry.holder_id,
            owner: Some(&entry.owner),
            fence: entry.fence,
            since_ms: None,
            last_seen_ms: None,
        };
        tracing::info!(target: "leasehold_server::audit", ?line, id, "journal");
        app.audit.as_ref().map_or(Ok(()), |audit| audit.write(&line))
    };
    if write("asked").is_err() {
        return Err(Problem::not_audited());
    }
    let settled = {
        let id = id.clone();
        with_journal(&app, move |journal| journal.settle(&id)).await?
    };
    // The change is made and its first audit line is on disk, so a failure here changes nothing.
    let _ = write(if settled { "settled" } else { "gone" });
    if settled { Ok(Json(entry.into())) } else { Err(none()) }
}

/// Returns all unsettled entries; none if there is no journal.
pub(crate) async fn entries(app: &App) -> Result<Vec<JournalEntry>, Problem> {
    if app.locks.journal().is_none() {
        return Ok(Vec::new());
    }
    with_journal(app, Journal::entries).await
}

async fn with_journal<T: Send + 'static>(
    app: &App,
    work: impl FnOnce(&Journal) -> std::io::Result<T> + Send + 'static,
) -> Result<T, Problem> {
    let unusable = || {
        let text = "the journal cannot be used; the server's log says why";
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "journal_unusable", text)
    };
    let journal = app.locks.journal().cloned().ok_or_else(unusable)?;
    let done = tokio::task::spawn_blocking(move || {
        work(&journal)
            .inspect_err(|error| tracing::error!(dir = %journal.dir().display(), %error, "the journal cannot be used"))
    });
    match done.await {
        Ok(Ok(done)) => Ok(done),
        _ => Err(unusable()),
    }
}

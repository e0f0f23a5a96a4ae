//! The journal of this machine: what could not be done and was written down, and the operator's way to settle it.

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::{Extension, Json};
use leasehold::{Journal, JournalEntry, JournalKind};
use serde::{Deserialize, Serialize};

use crate::App;
use crate::answer::{Problem, Said};
use crate::asked::{Sent, reason, segment};
use crate::audit::Line;
use crate::keys::Caller;

/// Entries in one answer; a journal that has more is worth a look on its machine.
const MOST: usize = 1_000;

/// What could not be done.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct JournalPage {
    /// Entries that are not settled, oldest first, at most 1000.
    entries: Vec<JournalEntryView>,
}

/// One thing that could not be done. Never its token.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct JournalEntryView {
    /// Names the entry.
    id: String,
    /// `unreleased`: a lock could not be released; `unprotected`: work ran without a lock.
    #[schema(value_type = String, example = "unreleased")]
    kind: JournalKind,
    /// The lock.
    name: String,
    /// In which store, without its secrets.
    store: String,
    /// In which namespace.
    namespace: String,
    /// Who held it.
    owner: String,
    /// The same, as it is named elsewhere.
    holder_id: String,
    /// Its fence, if it had one.
    fence: Option<u64>,
    /// Its lease: after that the store has forgotten it by itself.
    ttl_ms: u64,
    /// When.
    at_ms: u64,
    /// Why.
    why: String,
}

impl From<JournalEntry> for JournalEntryView {
    fn from(entry: JournalEntry) -> Self {
        let JournalEntry { id, kind, name, store, namespace, owner, holder_id, fence, ttl_ms, at_ms, why, .. } = entry;
        Self { id, kind, name, store, namespace, owner, holder_id, fence, ttl_ms, at_ms, why }
    }
}

/// Takes an entry out.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settle {
    /// Why, for the audit: 1 to 500 bytes.
    #[schema(min_length = 1, max_length = 500)]
    reason: String,
}

/// The `{id}` of a route.
pub(crate) struct EntryId(String);

impl<S: Send + Sync> FromRequestParts<S> for EntryId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        Ok(Self(segment(parts, state).await?))
    }
}

/// What could not be done and was written down
///
/// The journal of the machine and user this server runs as: releases that failed by every means, which are done when the
/// store is back, and work that ran without protection.
#[utoipa::path(get, path = "/api/v1/journal", tag = "journal", responses((status = 200, body = JournalPage)))]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<JournalPage>, Problem> {
    let entries = entries(&app).await?;
    Ok(Json(JournalPage { entries: entries.into_iter().take(MOST).map(Into::into).collect() }))
}

/// Take an entry out of the journal without doing anything
///
/// For what a person has seen to. The entry as it was is answered.
#[utoipa::path(post, path = "/api/v1/journal/{id}/settle", tag = "journal", request_body = Settle,
    params(("id" = String, Path, description = "the entry")),
    responses((status = 200, body = JournalEntryView), (status = 400, body = Said),
        (status = 404, description = "`no_such_entry`: it is not there, or not any more", body = Said)))]
pub(crate) async fn settle(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    EntryId(id): EntryId,
    Sent(asked): Sent<Settle>,
) -> Result<Json<JournalEntryView>, Problem> {
    let reason = reason(&asked.reason)?;
    let none = || {
        let text = "the journal has no such entry, or not any more; look at it again";
        Problem::new(StatusCode::NOT_FOUND, "no_such_entry", text)
    };
    let entry = entries(&app).await?.into_iter().find(|entry| entry.id == id).ok_or_else(none)?;
    let write = |outcome: &str| {
        let line = Line {
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
    // It is done, and that it was to be done stands there already.
    let _ = write(if settled { "settled" } else { "gone" });
    if settled { Ok(Json(entry.into())) } else { Err(none()) }
}

/// Everything that is not settled; nothing where there is no journal.
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

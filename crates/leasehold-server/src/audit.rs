//! The audit: who changed what, which holder it affected, and why. Each entry is one line of JSON, written to disk
//! before the change is made.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::App;
use crate::extract::QueryParams;
use crate::problem::{Problem, ProblemBody};

/// The default and the largest number of lines in a response.
const DEFAULT_LINES: usize = 100;
const MAX_LINES: usize = 1_000;
/// How much is read at a time from the end of the file, and the most that is read for one response.
const BLOCK_BYTES: u64 = 64 * 1024;
const MAX_READ_BYTES: usize = 8 * 1024 * 1024;

/// An append-only file of audit lines.
#[derive(Debug)]
pub(crate) struct Audit {
    path: PathBuf,
    file: Mutex<File>,
}

/// One audit line.
#[derive(Debug, Serialize)]
pub(crate) struct AuditLine<'a> {
    /// `asked`, then the outcome.
    pub(crate) outcome: &'a str,
    /// The requested action: `revoke`, `force`, `ask` (to finish) or `settle`.
    pub(crate) action: &'a str,
    pub(crate) name: &'a str,
    pub(crate) reason: &'a str,
    /// The name of the key, and its id.
    pub(crate) who: &'a str,
    pub(crate) key_id: Option<&'a str>,
    /// The holder named in the request.
    pub(crate) holder_id: &'a str,
    /// The owner of the lock and its fence, once known.
    pub(crate) owner: Option<&'a str>,
    pub(crate) fence: Option<u64>,
    /// When the holder acquired the lock, and its last heartbeat.
    pub(crate) since_ms: Option<u64>,
    pub(crate) last_seen_ms: Option<u64>,
}

impl Audit {
    /// Opens or creates the file, readable by its owner only, and creates its directory.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
        Ok(Self { path: path.to_owned(), file: Mutex::new(file) })
    }

    /// Writes one line to disk.
    pub(crate) fn write(&self, line: &AuditLine<'_>) -> io::Result<()> {
        #[derive(Serialize)]
        struct Dated<'a> {
            at_ms: u64,
            #[serde(flatten)]
            line: &'a AuditLine<'a>,
        }
        let mut text = serde_json::to_string(&Dated { at_ms: crate::clock::unix_ms(), line })? + "\n";
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        // A full disk or a crash may have left a partial line. Start a new line, or neither could be parsed.
        if is_torn(&file)? {
            text.insert(0, '\n');
        }
        // One write per line: several servers may share the file.
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_data());
        written.inspect_err(|error| tracing::error!(path = %self.path.display(), %error, "the audit cannot be written"))
    }

    /// Returns the last lines, newest first. Lines that are not JSON, such as partial ones, are skipped.
    fn last(&self, limit: usize) -> io::Result<Vec<Value>> {
        let file = File::open(&self.path)?;
        let mut from = file.metadata()?.len();
        let mut tail: Vec<u8> = Vec::new();
        // One line break more than lines, because the first block may start within a line.
        while from > 0 && tail.len() < MAX_READ_BYTES && tail.iter().filter(|b| **b == b'\n').count() <= limit {
            let begin = from.saturating_sub(BLOCK_BYTES);
            let mut block = vec![0; usize::try_from(from - begin).unwrap_or(0)];
            file.read_exact_at(&mut block, begin)?;
            block.append(&mut tail);
            (tail, from) = (block, begin);
        }
        let lines = tail.split(|byte| *byte == b'\n').rev();
        Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).take(limit).collect())
    }
}

/// Whether a file ends within a line. A file that is not regular has no length and counts as complete.
fn is_torn(file: &File) -> io::Result<bool> {
    let Some(last) = file.metadata()?.len().checked_sub(1) else { return Ok(false) };
    let mut byte = [0];
    file.read_exact_at(&mut byte, last)?;
    Ok(byte != *b"\n")
}

/// The query of the audit.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AuditParams {
    /// How many lines: 1 to 1000, 100 by default.
    #[param(minimum = 1, maximum = 1_000)]
    limit: Option<usize>,
}

/// The last lines of the audit.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct AuditPage {
    /// The lines as written to the file, newest first; empty if no file is configured. Each has `at_ms`, `outcome`,
    /// `action`, `name`, `reason`, `who`, `key_id`, `holder_id`, `owner`, `fence`, `since_ms` and `last_seen_ms`.
    #[schema(value_type = Vec<Object>)]
    lines: Vec<Value>,
}

/// List the audit: who changed what, and why
#[utoipa::path(get, path = "/api/v1/audit", tag = "journal", params(AuditParams),
    responses((status = 200, body = AuditPage), (status = 400, body = ProblemBody)))]
pub(crate) async fn list(
    State(app): State<App>,
    QueryParams(params): QueryParams<AuditParams>,
) -> Result<Json<AuditPage>, Problem> {
    let limit = params.limit.unwrap_or(DEFAULT_LINES);
    if !(1..=MAX_LINES).contains(&limit) {
        return Err(Problem::bad_request("invalid_limit", format!("limit is {limit}; it must be 1 to {MAX_LINES}")));
    }
    let read =
        tokio::task::spawn_blocking(move || app.audit.as_ref().map_or(Ok(Vec::new()), |audit| audit.last(limit)));
    match read.await {
        Ok(Ok(lines)) => Ok(Json(AuditPage { lines })),
        failed => {
            tracing::error!(?failed, "the audit cannot be read");
            let text = "the audit cannot be read; the server's log says why";
            Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "audit_unusable", text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(reason: &str) -> AuditLine<'_> {
        AuditLine {
            outcome: "asked",
            action: "force",
            name: "a",
            reason,
            who: "ops",
            key_id: None,
            holder_id: "7f3a91c2b04d",
            owner: None,
            fence: None,
            since_ms: None,
            last_seen_ms: None,
        }
    }

    #[test]
    fn the_last_lines_come_first_however_long_the_file_is() {
        let dir = tempfile::tempdir().expect("a directory");
        let audit = Audit::open(&dir.path().join("deep/audit.jsonl")).expect("opened");
        assert_eq!(audit.last(5).expect("read"), Vec::<Value>::new());
        let long = "x".repeat(400);
        for n in 0..1_000 {
            audit.write(&line(&format!("{n} {long}"))).expect("written");
        }
        audit.file.lock().expect("whole").write_all(b"{ broken\n").expect("written");
        audit.write(&line("last")).expect("written");
        let shown = |limit| {
            let reason =
                |line: &Value| line["reason"].as_str().expect("text").split(' ').next().expect("a word").to_owned();
            audit.last(limit).expect("read").iter().map(reason).collect::<Vec<_>>()
        };
        assert_eq!(shown(3), ["last", "999", "998"]);
        assert_eq!((shown(1_000).len(), shown(1_000)[999].as_str()), (1_000, "1"));
        assert_eq!(shown(2_000).len(), 1_001, "all there are");
    }

    #[test]
    fn a_line_after_a_partial_one_is_complete() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("audit.jsonl");
        let audit = Audit::open(&path).expect("opened");
        audit.write(&line("first")).expect("written");
        audit.write(&line("torn")).expect("written");
        // As a full disk would leave it.
        let length = std::fs::metadata(&path).expect("there").len();
        OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(length - 20)).expect("cut");
        for reason in ["second", "third"] {
            audit.write(&line(reason)).expect("written");
        }
        let reasons: Vec<_> = audit.last(10).expect("read").iter().map(|line| line["reason"].clone()).collect();
        assert_eq!(reasons, ["third", "second", "first"]);
        assert_eq!(std::fs::read_to_string(&path).expect("text").lines().count(), 4, "and no empty line");
    }
}

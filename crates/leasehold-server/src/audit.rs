//! The audit: who changed what, to whose harm and why. One line of JSON each, on disk before the change is
//! made and before it is answered.

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
use crate::answer::{Problem, Said};
use crate::asked::Asked;

/// Lines shown when nobody says how many, and at most.
const USUAL: usize = 100;
const MOST: usize = 1_000;
/// Read at once from the end of the file, and the most that is read for one answer.
const BLOCK: u64 = 64 * 1024;
const READ_MOST: usize = 8 * 1024 * 1024;

/// A file that is only ever added to.
#[derive(Debug)]
pub(crate) struct Audit {
    path: PathBuf,
    file: Mutex<File>,
}

/// One line.
#[derive(Debug, Serialize)]
pub(crate) struct Line<'a> {
    /// `asked`, then what became of it.
    pub(crate) outcome: &'a str,
    /// What was asked for: `revoke`, `force`, `ask` (to finish) or `settle`.
    pub(crate) action: &'a str,
    pub(crate) name: &'a str,
    pub(crate) reason: &'a str,
    /// The key's name, and its id.
    pub(crate) who: &'a str,
    pub(crate) key_id: Option<&'a str>,
    /// The holder that was named.
    pub(crate) holder_id: &'a str,
    /// Who that was, and its fence, once it is known.
    pub(crate) owner: Option<&'a str>,
    pub(crate) fence: Option<u64>,
    /// Since when it held the lock, and its last sign of life.
    pub(crate) since_ms: Option<u64>,
    pub(crate) last_seen_ms: Option<u64>,
}

impl Audit {
    /// Opens it, readable by its owner alone, and makes its directory.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
        Ok(Self { path: path.to_owned(), file: Mutex::new(file) })
    }

    /// Writes one line, to the disk.
    pub(crate) fn write(&self, line: &Line<'_>) -> io::Result<()> {
        #[derive(Serialize)]
        struct Dated<'a> {
            at_ms: u64,
            #[serde(flatten)]
            line: &'a Line<'a>,
        }
        let mut text = serde_json::to_string(&Dated { at_ms: crate::wall_ms(), line })? + "\n";
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        // A full disk, or a crash, left a part of a line: this one begins after it, or neither could be read.
        if is_torn(&file)? {
            text.insert(0, '\n');
        }
        // In one write: several servers may share the file.
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_data());
        written.inspect_err(|error| tracing::error!(path = %self.path.display(), %error, "the audit cannot be written"))
    }

    /// The last lines, newest first. One that is no JSON (a disk that was full once) is passed over.
    fn last(&self, limit: usize) -> io::Result<Vec<Value>> {
        let file = File::open(&self.path)?;
        let mut from = file.metadata()?.len();
        let mut tail: Vec<u8> = Vec::new();
        // One line break more than lines: the first piece may begin within a line.
        while from > 0 && tail.len() < READ_MOST && tail.iter().filter(|b| **b == b'\n').count() <= limit {
            let begin = from.saturating_sub(BLOCK);
            let mut block = vec![0; usize::try_from(from - begin).unwrap_or(0)];
            file.read_exact_at(&mut block, begin)?;
            block.append(&mut tail);
            (tail, from) = (block, begin);
        }
        let lines = tail.split(|byte| *byte == b'\n').rev();
        Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).take(limit).collect())
    }
}

/// Whether a file ends within a line. What is no regular file has no length, and no end.
fn is_torn(file: &File) -> io::Result<bool> {
    let Some(last) = file.metadata()?.len().checked_sub(1) else { return Ok(false) };
    let mut byte = [0];
    file.read_exact_at(&mut byte, last)?;
    Ok(byte != *b"\n")
}

/// How much of it.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Last {
    /// How many lines: 1 to 1000, 100 by default.
    #[param(minimum = 1, maximum = 1_000)]
    limit: Option<usize>,
}

/// The end of the audit.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct AuditPage {
    /// As they stand in the file, newest first; none where no file is written. Each has `at_ms`, `outcome`, `action`,
    /// `name`, `reason`, `who`, `key_id`, `holder_id`, `owner` and `fence`.
    #[schema(value_type = Vec<Object>)]
    lines: Vec<Value>,
}

/// Who changed what, and why
#[utoipa::path(get, path = "/api/v1/audit", tag = "journal", params(Last),
    responses((status = 200, body = AuditPage), (status = 400, body = Said)))]
pub(crate) async fn list(State(app): State<App>, Asked(last): Asked<Last>) -> Result<Json<AuditPage>, Problem> {
    let limit = last.limit.unwrap_or(USUAL);
    if !(1..=MOST).contains(&limit) {
        return Err(Problem::bad_request("invalid_limit", format!("limit is {limit}; it must be 1 to {MOST}")));
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

    fn line(reason: &str) -> Line<'_> {
        Line {
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
    fn a_line_after_a_torn_one_is_whole() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("audit.jsonl");
        let audit = Audit::open(&path).expect("opened");
        audit.write(&line("first")).expect("written");
        audit.write(&line("torn")).expect("written");
        // As a full disk leaves it.
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

//! The checkup: whether the file and its location are safe for locks.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::statvfs;

use super::driver::SqliteDriver;
use super::path::{self, beside, directory};
use super::row::unsql;
use crate::facts::Fence;
use crate::store::Finding;

/// A longer log means that a reader stays open, or that no checkpoint succeeded.
const LONG_LOG_BYTES: u64 = 64 << 20;
/// With less free space, the next growth of the file may fail.
const LITTLE_SPACE_BYTES: u64 = 64 << 20;
/// With less free space, the next lock may fail.
const NO_SPACE_BYTES: u64 = 1 << 20;

impl SqliteDriver {
    pub(super) fn checkup(&mut self) -> Vec<Finding> {
        let mut found = vec![self.check_place(), self.check_permissions(), self.check_space(), self.check_log()];
        found.insert(0, Finding::ok("reachable", format!("{}, SQLite {}", self.path.display(), rusqlite::version())));
        found.extend([self.check_contents(), self.check_fences(), self.check_others()]);
        found
    }

    fn check_place(&self) -> Finding {
        match path::sole_path(&self.path).and_then(|()| path::filesystem(directory(&self.path))) {
            Ok(kind) => Finding::ok("filesystem", format!("{kind}, which is local")),
            Err(error) => Finding::bad("filesystem", error.to_string()),
        }
    }

    fn check_permissions(&self) -> Finding {
        let files = ["", "-wal", "-shm", ".alive"].map(|suffix| beside(&self.path, suffix));
        let open = |path: &Path, bits: u32| {
            let mode = fs::metadata(path).ok()?.mode();
            (mode & bits != 0).then(|| format!("{} (mode {:o})", path.display(), mode & 0o7777))
        };
        if let Some(open) =
            files.iter().map(PathBuf::as_path).chain([directory(&self.path)]).find_map(|p| open(p, 0o002))
        {
            return Finding::warn(
                "permissions",
                format!("every user can write to {open}, and so take any lock: run chmod o-w"),
            );
        }
        match files.iter().find_map(|path| open(path, 0o004)) {
            None => Finding::ok("permissions", "only its user and group can read and write it"),
            Some(open) => {
                let text = format!(
                    "every user can read {open}, and so the tokens of all leases: its owner has to run chmod o-rwx"
                );
                Finding::warn("permissions", text)
            }
        }
    }

    fn check_space(&self) -> Finding {
        let dir = directory(&self.path);
        let free = match statvfs(dir) {
            Ok(stat) => stat.f_bavail.saturating_mul(stat.f_frsize),
            Err(error) => return Finding::warn("space", format!("{}: {error}", dir.display())),
        };
        let text = format!("{} free", mega(free));
        if free < NO_SPACE_BYTES {
            Finding::bad(
                "space",
                format!("{text}: new locks are refused when the file is full; held locks can be released"),
            )
        } else if free < LITTLE_SPACE_BYTES {
            Finding::warn("space", format!("{text}: when it is used up new locks are refused"))
        } else {
            Finding::ok("space", text)
        }
    }

    fn check_log(&self) -> Finding {
        // Reading the size opens no file: closing one of SQLite's would drop its locks.
        let bytes = fs::metadata(beside(&self.path, "-wal")).map_or(0, |m| m.len());
        let text = format!("the write-ahead log has {}", mega(bytes));
        if bytes > LONG_LOG_BYTES {
            return Finding::warn("log", format!("{text}: another program keeps the file open for reading; close it"));
        }
        Finding::ok("log", text)
    }

    fn check_contents(&mut self) -> Finding {
        const REPAIR: &str = "stop every program that uses it and move it away: a new one is created";
        match self.check() {
            Ok(said) if said == "ok" => Finding::ok("integrity", "SQLite finds no damage in the file"),
            Ok(said) => Finding::bad("integrity", format!("{said}; {REPAIR}")),
            Err(error) => Finding::bad("integrity", format!("{error}; {REPAIR}")),
        }
    }

    fn check_fences(&self) -> Finding {
        const HIGHEST: &str = "SELECT max(floor, ifnull((SELECT max(counter) FROM locks), 0)) FROM meta";
        match self.conn.query_row(HIGHEST, [], |row| row.get(0)).map(unsql) {
            Ok(highest) if highest < Fence::MAX => Finding::ok("fences", format!("the highest is {highest}")),
            Ok(highest) => Finding::bad(
                "fences",
                format!("{highest} is above 2^52: nothing is granted. Was the clock set centuries ahead?"),
            ),
            Err(error) => Finding::bad("fences", error.to_string()),
        }
    }

    fn check_others(&self) -> Finding {
        let others = self.liveness.others();
        let text = match others.alive {
            1 => "1 other process has it open".into(),
            n => format!("{n} other processes have it open"),
        };
        if others.unknown == 0 {
            return Finding::ok("processes", text);
        }
        let unknown = others.unknown;
        Finding::warn(
            "processes",
            format!(
                "{text}, {unknown} cannot be checked for permissions: when they die, only the end of the lease frees their locks"
            ),
        )
    }
}

fn mega(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} bytes"),
        10_000..10_000_000 => format!("{} kB", bytes / 1_000),
        10_000_000..10_000_000_000 => format!("{} MB", bytes / 1_000_000),
        _ => format!("{} GB", bytes / 1_000_000_000),
    }
}

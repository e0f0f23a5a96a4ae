//! The size of a test run, and the results that it prints.

use std::fs::OpenOptions;
use std::io::Write;

/// The variable for the size of a run: `full` for the published numbers, otherwise a small run.
pub const BOARD_VAR: &str = "LEASEHOLD_BOARD";

/// The variable with the path of the file that collects the results.
pub const BOARD_FILE_VAR: &str = "LEASEHOLD_BOARD_FILE";

/// Returns `full` if `LEASEHOLD_BOARD=full`, otherwise `small`.
pub fn full_or<T>(small: T, full: T) -> T {
    if std::env::var_os(BOARD_VAR).is_some_and(|size| size == "full") { full } else { small }
}

/// Prints `board <row>: <text>` and appends the line to the file that `LEASEHOLD_BOARD_FILE` names.
///
/// # Panics
/// If the file cannot be written, because a missing line would look like a row that did not run.
pub fn report(row: &str, text: String) {
    let line = format!("board {row}: {text}\n");
    print!("{line}");
    if let Some(path) = std::env::var_os(BOARD_FILE_VAR) {
        let file = OpenOptions::new().append(true).create(true).open(path);
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        written.expect("the board file can be written");
    }
}

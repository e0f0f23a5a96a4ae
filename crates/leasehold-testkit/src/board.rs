//! The size of a run, and the figures it prints.

use std::fs::OpenOptions;
use std::io::Write;

/// `full` asks for the numbers the boards publish; anything else is the small run of every day.
pub const BOARD_VAR: &str = "LEASEHOLD_BOARD";

/// Names a file that collects the figures.
pub const BOARD_FILE_VAR: &str = "LEASEHOLD_BOARD_FILE";

/// `full` when `LEASEHOLD_BOARD=full`, else `small`.
pub fn full_or<T>(small: T, full: T) -> T {
    if std::env::var_os(BOARD_VAR).is_some_and(|size| size == "full") {
        full
    } else {
        small
    }
}

/// Prints `board <row>: <text>`, and appends the same line to the file `LEASEHOLD_BOARD_FILE` names.
///
/// # Panics
/// When that file cannot be written: a figure that got lost would look like a row that did not run.
pub fn report(row: &str, text: String) {
    let line = format!("board {row}: {text}\n");
    print!("{line}");
    if let Some(path) = std::env::var_os(BOARD_FILE_VAR) {
        let file = OpenOptions::new().append(true).create(true).open(path);
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        written.expect("the board file can be written");
    }
}

//! The fault board: finds its rows in the sources of the tests, runs them one after the other, and prints a table.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::steps;
use crate::tools::Tools;
use crate::workspace::{Failure, Workspace};

/// The crates whose other tests print figures, too. The whole board runs them at full size.
const CRATES: [&str; 2] = ["leasehold-testkit", "leasehold-cli"];
/// The line of those tests in the table.
const OTHERS: &str = "others";

/// The test programs of each row.
type Rows = BTreeMap<String, BTreeSet<String>>;

/// Runs the rows that are asked for, or all and the tests that belong to no row. Fails if a row fails or prints no figure.
pub(crate) fn board(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let asked = parse_rows(arguments)?;
    let all = rows_in(&workspace.root)?;
    if let Some(unknown) = asked.iter().find(|row| !all.contains_key(*row)) {
        let rows: Vec<&str> = all.keys().map(String::as_str).collect();
        return Err(Failure::Usage(format!("there is no row {unknown}. The rows are {}", rows.join(" "))));
    }
    let tools = Tools::new(workspace);
    tools.c_compiler()?;
    tools.redis_server()?;
    let python = tools.python().ok();
    let file = workspace.target.join("board.txt");
    start_afresh(&file)?;
    // The command as it is installed: optimised. The tests, which ask it, need not be.
    let program = ["build", "--release", "--package", "leasehold-cli"];
    steps::run_one(workspace, workspace.cargo(&program))?;
    let test = |programs: &BTreeSet<String>| {
        let mut command = workspace.cargo(&["test", "--workspace", "--all-features", "--no-fail-fast"]);
        programs.iter().for_each(|program| _ = command.args(["--test", program]));
        command.env("LEASEHOLD_BOARD", "full").env("LEASEHOLD_BOARD_FILE", &file);
        command.env("LEASEHOLD_TEST_PROGRAM", workspace.target.join("release/leasehold"));
        if let Some(python) = &python {
            command.env("LEASEHOLD_TEST_PYTHON", python);
        }
        command
    };
    let rows: Rows = all.into_iter().filter(|(row, _)| asked.is_empty() || asked.contains(row)).collect();
    // A test that does not compile is not a row that fails.
    let mut build = test(&rows.values().flatten().cloned().collect());
    build.arg("--no-run");
    steps::run_one(workspace, build)?;
    let mut results = Vec::new();
    let mut run = |row: &str, mut command: Command, filter: Vec<String>| {
        command.args(["--", "--nocapture", "--test-threads=1"]).args(filter);
        let began = Instant::now();
        let passed = steps::run_one(workspace, command).is_ok();
        results.push(Ran { row: row.to_owned(), passed, took: began.elapsed() });
    };
    for (row, programs) in &rows {
        run(row, test(programs), vec![test_filter(row)]);
    }
    if asked.is_empty() {
        let mut programs = BTreeSet::new();
        for name in CRATES {
            programs.extend(workspace.tests_of(name)?);
        }
        let skipped = rows.keys().flat_map(|row| [String::from("--skip"), test_filter(row)]);
        run(OTHERS, test(&programs), skipped.collect());
    }
    let text = read_figures(&file)?;
    let (table, failed) = table(&results, &figures(&text));
    print!("\n{table}");
    if failed.is_empty() { Ok(()) } else { Err(Failure::Failed(format!("failed: {}", failed.join(", ")))) }
}

/// Parses row names, in upper or lower case.
fn parse_rows(arguments: &[String]) -> Result<Vec<String>, Failure> {
    let parse = |text: &String| {
        let other = || Failure::Usage(format!("`{text}` is not a row such as F01"));
        parse_row(text).ok_or_else(other)
    };
    arguments.iter().map(parse).collect()
}

/// Parses a row's name: a letter and two digits, and a small letter for a variant (`F20b`).
fn parse_row(text: &str) -> Option<String> {
    let [letter, digits @ ..] = text.as_bytes() else { return None };
    let (digits, variant) = digits.split_at_checked(2)?;
    let is_row = letter.is_ascii_alphabetic()
        && digits.iter().all(u8::is_ascii_digit)
        && matches!(variant, [] | [b'a'..=b'z' | b'A'..=b'Z']);
    is_row.then(|| format!("{}{}", text[..1].to_ascii_uppercase(), text[1..].to_ascii_lowercase()))
}

/// Finds the rows: tests whose names start with one, in the test programs of the crates and the examples.
fn rows_in(root: &Path) -> Result<Rows, Failure> {
    let mut rows = Rows::new();
    for group in ["crates", "examples"] {
        for package in entries(&root.join(group))? {
            let tests = package.join("tests");
            if !tests.is_dir() {
                continue;
            }
            for path in entries(&tests)? {
                let program = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
                for row in rows_of(&path)? {
                    rows.entry(row).or_default().insert(program.clone());
                }
            }
        }
    }
    Ok(rows)
}

/// The rows in a source file, or in all of a directory.
fn rows_of(path: &Path) -> Result<Vec<String>, Failure> {
    if path.is_dir() {
        let nested: Result<Vec<_>, _> = entries(path)?.iter().map(|path| rows_of(path)).collect();
        return Ok(nested?.concat());
    }
    if path.extension().is_none_or(|ending| ending != "rs") {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(path).map_err(|error| unreadable(path, &error))?;
    let functions = text.lines().filter_map(|line| line.split_once("fn ").map(|(_, name)| name));
    Ok(functions
        .filter_map(|name| parse_row(name.split_once('_')?.0).filter(|row| name.starts_with(&test_filter(row))))
        .collect())
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = std::fs::read_dir(dir).map_err(|error| unreadable(dir, &error))?;
    Ok(entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::Failed(format!("cannot read {}: {error}", path.display()))
}

/// The start of the names of the tests that make up a row.
fn test_filter(row: &str) -> String {
    format!("{}_", row.to_ascii_lowercase())
}

/// Removes the figures of an earlier run, so that none passes for a new one.
fn start_afresh(file: &Path) -> Result<(), Failure> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Failure::Failed(format!("cannot remove {}: {error}", file.display())))
        }
        _ => Ok(()),
    }
}

/// Reads the file of the figures. It is missing if no test printed one.
fn read_figures(file: &Path) -> Result<String, Failure> {
    match std::fs::read_to_string(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        read => read.map_err(|error| unreadable(file, &error)),
    }
}

/// The lines `board F01: text`: the row and the text.
fn figures(text: &str) -> Vec<(&str, &str)> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("board ")?.split_once(": "));
    lines.map(|(row, figure)| (row.trim(), figure.trim())).collect()
}

/// A row that was run.
struct Ran {
    row: String,
    passed: bool,
    took: Duration,
}

/// The table, a line per row with all its figures, and the rows that failed. A row without a figure has failed: its filter
/// may have matched no test.
fn table(results: &[Ran], figures: &[(&str, &str)]) -> (String, Vec<String>) {
    let mut text = String::new();
    let mut failed = Vec::new();
    for Ran { row, passed, took } in results {
        let is_other = |printed: &str| results.iter().all(|result| result.row != printed);
        let is_of_it = |printed: &str| if row == OTHERS { is_other(printed) } else { printed == row };
        let of_row: Vec<_> =
            figures.iter().filter(|(printed, _)| is_of_it(printed)).map(|(_, figure)| *figure).collect();
        let word = match (passed, of_row.is_empty()) {
            (true, false) => "ok",
            (true, true) => "NO FIGURE",
            (false, _) => "FAILED",
        };
        if word != "ok" {
            failed.push(row.clone());
        }
        let line = format!("{row:<6}  {word:<9}  {:>7.1} s  {}", took.as_secs_f64(), of_row.join("; "));
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.push_str(&format!("{} of {} ok\n", results.len() - failed.len(), results.len()));
    (text, failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_a_letter_and_two_digits() {
        let rows = parse_rows(&["f01".into(), "D12".into(), "F20B".into()]).expect("three rows");
        assert_eq!(rows, ["F01", "D12", "F20b"]);
        assert_eq!([test_filter(&rows[0]), test_filter(&rows[2])], ["f01_", "f20b_"]);
        for wrong in ["F1", "F001", "F20bb", "01F", "--full", "é1", ""] {
            assert!(matches!(parse_rows(&[wrong.into()]), Err(Failure::Usage(_))), "{wrong}");
        }
    }

    #[test]
    fn every_row_that_the_pages_name_is_run() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace is one above");
        let rows = rows_in(root).expect("read");
        assert!(rows.len() >= 40 && rows["F01"] == BTreeSet::from(["faults".into()]), "{rows:?}");
        for page in ["docs/conformance.md", "docs/server.md", "docs/guarantees.md", "CHANGELOG.md"] {
            let text = std::fs::read_to_string(root.join(page)).expect("a page");
            let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '*');
            let named = words.filter_map(|word| {
                let (first, rest) = word.split_once('_')?;
                parse_row(first).filter(|row| word.starts_with(&test_filter(row)) && !rest.is_empty())
            });
            for row in named {
                assert!(rows.contains_key(&row), "{page} names the row {row}, and no test makes it up");
            }
        }
    }

    #[test]
    fn the_table_has_a_line_per_row_and_a_row_without_a_figure_fails() {
        let text = "board F02: 0 of 200: none\nnoise\nboard F01: b\nboard F01: a\nboard pools: 3 of 8\n";
        let ran = |row: &str, passed| Ran { row: row.into(), passed, took: Duration::from_millis(1_500) };
        let results = [ran("F01", true), ran("F02", false), ran("F03", true), ran(OTHERS, true)];
        let (table, failed) = table(&results, &figures(text));
        assert_eq!(failed, ["F02", "F03"]);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines,
            [
                "F01     ok             1.5 s  b; a",
                "F02     FAILED         1.5 s  0 of 200: none",
                "F03     NO FIGURE      1.5 s",
                "others  ok             1.5 s  3 of 8",
                "2 of 4 ok",
            ]
        );
    }
}

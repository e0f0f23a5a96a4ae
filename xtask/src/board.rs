//! The fault board: which rows to run, and the table of their results.

use std::io::ErrorKind;
use std::path::Path;

use crate::workspace::Failure;

/// Parses row names: a letter and two digits, and a small letter for a variant (`F20b`). The first letter may be given
/// in either case.
pub(crate) fn parse_rows(arguments: &[String]) -> Result<Vec<String>, Failure> {
    let is_row = |row: &str| match row.as_bytes() {
        [letter, digits @ ..] if digits.len() >= 2 => {
            let (digits, variant) = digits.split_at(2);
            letter.is_ascii_uppercase()
                && digits.iter().all(u8::is_ascii_digit)
                && matches!(variant, [] | [b'a'..=b'z'])
        }
        _ => false,
    };
    let rows: Vec<String> = arguments
        .iter()
        .map(|row| row.to_ascii_lowercase())
        .map(|row| row.chars().enumerate().map(|(i, c)| if i == 0 { c.to_ascii_uppercase() } else { c }).collect())
        .collect();
    match rows.iter().find(|row| !is_row(row)) {
        Some(other) => Err(Failure::Usage(format!("`{other}` is not a row such as F01"))),
        None => Ok(rows),
    }
}

/// Returns the prefix of the names of a row's tests.
pub(crate) fn test_filter(row: &str) -> String {
    format!("{}_", row.to_ascii_lowercase())
}

/// Removes the results of an earlier run, so that they are not taken for new ones.
pub(crate) fn remove_old_results(file: &Path) -> Result<(), Failure> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Failure::Failed(format!("cannot remove {}: {error}", file.display())))
        }
        _ => Ok(()),
    }
}

/// Prints the results in the file, and returns the requested rows without one: a filter that matches no test passes, but its
/// row was not run.
pub(crate) fn print(file: &Path, requested: &[String]) -> Result<Vec<String>, Failure> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        Err(error) => {
            return Err(Failure::Failed(format!("cannot read {}: {error}", file.display())));
        }
    };
    let results = results(&text);
    println!("\nresults: {}", results.len());
    for (row, result) in &results {
        println!("  {row}  {result}");
    }
    let has_result = |row: &String| results.iter().any(|(printed, _)| printed == row);
    Ok(requested.iter().filter(|row| !has_result(row)).cloned().collect())
}

/// Parses lines such as `board F01: text`, sorted by row. Several lines of one row keep their order.
fn results(text: &str) -> Vec<(&str, &str)> {
    let mut figures: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("board ")?.split_once(": "))
        .map(|(row, figure)| (row.trim(), figure.trim()))
        .collect();
    figures.sort_by_key(|(row, _)| *row);
    figures
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
    fn results_are_sorted_and_other_lines_are_skipped() {
        let text = "board F02: 0 of 200: none\nnoise\nboard F01: b\nboard F01: a\n";
        assert_eq!(results(text), [("F01", "b"), ("F01", "a"), ("F02", "0 of 200: none")]);
    }

    #[test]
    fn a_row_without_a_result_is_reported() {
        let nowhere = Path::new("no-such-board.txt");
        remove_old_results(nowhere).expect("nothing to remove");
        assert_eq!(print(nowhere, &["F01".into()]).expect("an empty board"), ["F01"]);
    }
}

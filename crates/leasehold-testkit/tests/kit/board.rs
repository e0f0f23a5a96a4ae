use std::process::Command;

use leasehold_testkit::{full_or, report};

const ROLE: &str = "KIT_BOARD_ROLE";

/// Runs this test binary again, because environment variables belong to a process.
fn run_again(vars: &[(&str, &str)]) -> String {
    let output = Command::new(std::env::current_exe().expect("this test binary"))
        .args(["--exact", "kit::board::reports_a_row", "--nocapture"])
        .env(ROLE, "child")
        .env_remove("LEASEHOLD_BOARD")
        .env_remove("LEASEHOLD_BOARD_FILE")
        .envs(vars.iter().copied())
        .output()
        .expect("the test binary runs");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn reports_a_row() {
    if std::env::var_os(ROLE).is_some() {
        report("F00", format!("{} runs", full_or(5, 500)));
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("board.txt");
    let file = path.to_str().expect("a plain path");
    assert!(run_again(&[]).contains("board F00: 5 runs\n"));
    assert!(!path.exists());
    assert!(
        run_again(&[("LEASEHOLD_BOARD", "full"), ("LEASEHOLD_BOARD_FILE", file)]).contains("board F00: 500 runs\n")
    );
    run_again(&[("LEASEHOLD_BOARD", "small"), ("LEASEHOLD_BOARD_FILE", file)]);
    let lines = std::fs::read_to_string(&path).expect("the board file");
    assert_eq!(lines, "board F00: 500 runs\nboard F00: 5 runs\n");
}

//! Steps run one after the other, stopping at the first that fails, and the table of their times.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::workspace::{Failure, Workspace};

/// One line of the plan: something to run, or the reason it is not run.
pub(crate) struct Step {
    title: &'static str,
    work: Work,
}

enum Work {
    Run(Box<Command>),
    Skip(String),
}

impl Step {
    pub(crate) fn run(title: &'static str, command: Command) -> Step {
        Step { title, work: Work::Run(Box::new(command)) }
    }

    pub(crate) fn skip(title: &'static str, reason: Failure) -> Step {
        Step { title, work: Work::Skip(reason.to_string()) }
    }
}

/// The outcome of a step.
#[derive(Debug, PartialEq)]
enum Outcome {
    Passed(Duration),
    Failed(Duration),
    Skipped(String),
    NotReached,
}

/// Runs the plan and prints the table, even if a step failed.
pub(crate) fn run_all(workspace: &Workspace, plan: Vec<Step>) -> Result<(), Failure> {
    let started = Instant::now();
    let mut results = Vec::new();
    let mut failure = None;
    for Step { title, work } in plan {
        let outcome = match work {
            Work::Skip(reason) => Outcome::Skipped(reason),
            Work::Run(_) if failure.is_some() => Outcome::NotReached,
            Work::Run(command) => {
                let step_started = Instant::now();
                match run_one(workspace, *command) {
                    Ok(()) => Outcome::Passed(step_started.elapsed()),
                    Err(reason) => {
                        failure = Some(reason);
                        Outcome::Failed(step_started.elapsed())
                    }
                }
            }
        };
        results.push((title, outcome));
    }
    eprint!("\n{}", table(&results, started.elapsed()));
    failure.map_or(Ok(()), Err)
}

/// Runs a command, prints it, and measures its time.
pub(crate) fn run_one(workspace: &Workspace, mut command: Command) -> Result<(), Failure> {
    let shown = workspace.shown(&command);
    eprintln!("\n==> {shown}");
    // Without a terminal this process may be alone in its session, and its group orphaned. Tests stop processes, and the
    // kernel can hang up an orphaned group for that: so the step gets a group that has a parent. At a terminal it stays
    // in this process's group, where Ctrl-C reaches it.
    if File::open("/dev/tty").is_err() {
        command.process_group(0);
    }
    let started = Instant::now();
    let status = command.status().map_err(|error| Failure::Failed(format!("`{shown}` did not start: {error}")))?;
    let word = if status.success() { "done" } else { "FAILED" };
    eprintln!("    {word} after {}", seconds(started.elapsed()));
    if status.success() {
        return Ok(());
    }
    Err(Failure::Failed(format!("`{shown}` failed ({status})")))
}

fn table(results: &[(&str, Outcome)], total: Duration) -> String {
    let width = results.iter().map(|(title, _)| title.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (title, outcome) in results {
        let (time, word) = match outcome {
            Outcome::Passed(time) => (seconds(*time), String::from("ok")),
            Outcome::Failed(time) => (seconds(*time), String::from("FAILED")),
            Outcome::Skipped(reason) => (String::from("-"), format!("skipped: {reason}")),
            Outcome::NotReached => (String::from("-"), String::from("not reached")),
        };
        text.push_str(&format!("  {title:<width$}  {time:>9}  {word}\n"));
    }
    text.push_str(&format!("  {:<width$}  {:>9}\n", "total", seconds(total)));
    text
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_distinguishes_the_outcomes() {
        let results = [
            ("format", Outcome::Passed(Duration::from_millis(740))),
            ("docs", Outcome::Skipped(String::from("--quick"))),
            ("tests", Outcome::Failed(Duration::from_secs(61))),
            ("later", Outcome::NotReached),
        ];
        assert_eq!(
            table(&results, Duration::from_secs(62)),
            "  format      0.7 s  ok\n  docs            -  skipped: --quick\n  \
               tests      61.0 s  FAILED\n  later           -  not reached\n  \
               total      62.0 s\n"
        );
    }

    #[test]
    fn the_first_failure_stops_the_plan() {
        let workspace = Workspace { root: ".".into(), target: "target".into() };
        let step = |title, program| Step::run(title, Command::new(program));
        assert!(run_all(&workspace, vec![step("yes", "true")]).is_ok());
        let plan = vec![step("no", "false"), step("never", "no-such-program")];
        let failure = run_all(&workspace, plan).expect_err("`false` fails");
        assert!(failure.to_string().contains("`false` failed"), "{failure}");
    }
}

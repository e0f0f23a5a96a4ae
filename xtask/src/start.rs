//! Compares the run time of `leasehold run` with flock(1).

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::steps;
use crate::workspace::{Failure, Workspace};

const ROUNDS: usize = 400;
/// The largest allowed ratio to flock.
const BOUND: f64 = 3.0;

/// Runs the programs in turn, and prints the medians and the ratio.
pub(crate) fn bench_start(workspace: &Workspace) -> Result<(), Failure> {
    steps::run_one(workspace, workspace.cargo(&["build", "--release", "--quiet", "--package", "leasehold-cli"]))?;
    let dir = workspace.target.join(format!("bench-start-{}", std::process::id()));
    std::fs::create_dir_all(&dir).map_err(|error| failed(&dir, &error))?;
    // A copy, as installed. The page cache has the linker's output in small pieces, so that every start of that file can take
    // half a millisecond longer.
    let program = dir.join("leasehold");
    let copied = std::fs::copy(workspace.target.join("release/leasehold"), &program);
    let measured = copied.map_err(|error| failed(&program, &error)).and_then(|_| measure(&program, &dir));
    std::fs::remove_dir_all(&dir).map_err(|error| failed(&dir, &error))?;
    let [nothing, flock, run] = measured?;
    println!("true            {nothing:>7.2} ms   median of {ROUNDS}, in turn");
    println!("flock f true    {flock:>7.2} ms");
    println!("run x -- true   {run:>7.2} ms");
    let ratio = run / flock;
    println!("run / flock     {ratio:>7.2}      ≤ {BOUND}   {}", if ratio <= BOUND { "ok" } else { "MISSED" });
    Ok(())
}

fn measure(leasehold: &Path, dir: &Path) -> Result<[f64; 3], Failure> {
    let mut flock = Command::new("flock");
    flock.arg(dir.join("f")).arg("true");
    let mut run = Command::new(leasehold);
    // Without this machine's journal.
    run.env("XDG_STATE_HOME", dir);
    run.arg("--store").arg(format!("sqlite:{}", dir.join("locks.db").display())).args(["run", "x", "--", "true"]);
    let mut contenders = [Command::new("true"), flock, run];
    let mut times = [const { Vec::new() }; 3];
    for round in 0..ROUNDS {
        for i in 0..3 {
            // Another program is first each time.
            let i = (i + round) % 3;
            times[i].push(one(&mut contenders[i])?);
        }
    }
    Ok(times.map(median))
}

/// Runs a command once and returns its run time in milliseconds.
fn one(command: &mut Command) -> Result<f64, Failure> {
    let began = Instant::now();
    let status = command.stdin(Stdio::null()).status();
    let took = began.elapsed().as_secs_f64() * 1e3;
    let program = Path::new(command.get_program()).to_owned();
    match status {
        Ok(status) if status.success() => Ok(took),
        Ok(status) => Err(failed(&program, &status)),
        Err(error) => Err(failed(&program, &error)),
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn failed(what: &Path, why: &dyn std::fmt::Display) -> Failure {
    Failure::Failed(format!("{}: {why}", what.display()))
}

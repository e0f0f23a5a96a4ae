//! Runs the simulation: many seeds, one seed with its story, or planted bugs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::planted::{PLANTED, Planted};
use crate::steps;
use crate::workspace::{Failure, Workspace};

const SEEDS: u64 = 20_000;
const QUICK_SEEDS: u64 = 500;
/// The number of seeds within which a planted bug must be found.
const PLANTED_SEEDS: u64 = 20_000;

/// The arguments.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Seeds(u64),
    Seed(u64),
    Planted,
}

pub(crate) fn simulate(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    match parse(arguments)? {
        Asked::Seeds(seeds) => {
            let mut command = test(workspace, "simulate_many_seeds");
            command.env("LEASEHOLD_SIMULATE_SEEDS", seeds.to_string());
            steps::run_one(workspace, command)
        }
        Asked::Seed(seed) => {
            let mut command = test(workspace, "simulate_one_seed");
            command.env("LEASEHOLD_SIMULATE_SEED", seed.to_string());
            steps::run_one(workspace, command)
        }
        Asked::Planted => planted(workspace),
    }
}

fn parse(arguments: &[String]) -> Result<Asked, Failure> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse().map_err(|_| Failure::Usage(format!("`{text}` is not a number")));
    match words[..] {
        [] => Ok(Asked::Seeds(SEEDS)),
        ["--quick"] => Ok(Asked::Seeds(QUICK_SEEDS)),
        ["--planted"] => Ok(Asked::Planted),
        ["--seeds", seeds] => number(seeds).map(Asked::Seeds),
        ["--seed", seed] => number(seed).map(Asked::Seed),
        ["--seeds", _, "--seed", _] | ["--seed", _, "--seeds", _] => Err(Failure::Usage(String::from(
            "--seeds N runs the seeds below N, and --seed S tells the story of one: give one of the two",
        ))),
        _ => Err(Failure::Usage(format!("`{}` is not known here", words.join(" ")))),
    }
}

fn test(workspace: &Workspace, name: &str) -> Command {
    let mut command = workspace.cargo(&["test", "--profile", "simulate", "-p", "leasehold", "--lib"]);
    command.args([&format!("simulation::{name}"), "--", "--exact", "--nocapture"]);
    command
}

/// Plants each bug in a copy of the sources, and runs seeds until it is found.
fn planted(workspace: &Workspace) -> Result<(), Failure> {
    let dir = workspace.target.join("planted");
    let source = dir.join("source");
    copy_sources(workspace, &source)?;
    let mut missed = Vec::new();
    println!("| planted bug | seeds | found by | violation |\n|---|---|---|---|");
    for bug in PLANTED {
        let began = Instant::now();
        let found = plant(workspace, &source, bug);
        let restored = copy_file(&bug.path_in(&workspace.root), &bug.path_in(&source));
        let output = found?;
        restored?;
        let story = dir.join(format!("{}.txt", bug.name));
        write(&story, output.as_bytes())?;
        match Found::read(&output) {
            Some(Found { seed, seeds, violation }) => {
                println!("| {} | {seeds} | seed {seed} | {violation} |", bug.name);
            }
            None => {
                println!("| {} | {PLANTED_SEEDS} | **not found** | see {} |", bug.name, workspace.relative(&story));
                missed.push(bug.name);
            }
        }
        eprintln!("    {} after {:.0} s: {}", bug.name, began.elapsed().as_secs_f64(), workspace.relative(&story));
    }
    if missed.is_empty() {
        return Ok(());
    }
    Err(Failure::Failed(format!("not found: {}", missed.join(", "))))
}

/// Builds the copy with one bug and runs it. Returns what the run printed.
fn plant(workspace: &Workspace, source: &Path, bug: &Planted) -> Result<String, Failure> {
    let path = bug.path_in(source);
    let sound = read(&path)?;
    write(&path, bug.apply(&sound)?.as_bytes())?;
    let manifest = source.join("Cargo.toml");
    let mut command = workspace.command(Path::new("cargo"));
    command.args(["test", "--profile", "simulate", "--manifest-path"]).arg(manifest);
    command.arg("--target-dir").arg(&workspace.target);
    command.args(["-p", "leasehold", "--lib", "simulation::simulate_many_seeds", "--", "--exact", "--nocapture"]);
    command.env("LEASEHOLD_SIMULATE_SEEDS", PLANTED_SEEDS.to_string()).env("RUST_BACKTRACE", "0");
    let output = command.output().map_err(|error| Failure::Failed(format!("cargo did not start: {error}")))?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if text.contains("could not compile") {
        return Err(Failure::Failed(format!("with `{}` planted the sources do not compile:\n{text}", bug.name)));
    }
    Ok(text)
}

/// The result of a failing run.
struct Found<'a> {
    seed: &'a str,
    seeds: &'a str,
    violation: &'a str,
}

impl<'a> Found<'a> {
    fn read(output: &'a str) -> Option<Self> {
        let mut lines = output.lines().skip_while(|line| !line.starts_with("seed "));
        let (seed, violation) = lines.next()?.strip_prefix("seed ")?.split_once(": ")?;
        let seeds = lines.next()?.strip_prefix("after ")?.strip_suffix(" seeds")?;
        Some(Self { seed, seeds, violation })
    }
}

/// Copies the sources of the workspace. Unchanged files are not written, so that they are not built again.
fn copy_sources(workspace: &Workspace, to: &Path) -> Result<(), Failure> {
    for part in ["Cargo.toml", "Cargo.lock", "README.md", "docs", "crates", "examples", "python", "xtask"] {
        copy_tree(&workspace.root.join(part), &to.join(part))?;
    }
    Ok(())
}

fn copy_tree(from: &Path, to: &Path) -> Result<(), Failure> {
    if !from.is_dir() {
        return copy_file(from, to);
    }
    let entries = fs::read_dir(from).map_err(|error| failed("read", from, &error))?;
    for entry in entries {
        let path = entry.map_err(|error| failed("read", from, &error))?.path();
        let name = path.file_name().unwrap_or_default();
        let is_built = ["target", "node_modules", "__pycache__", ".venv"].iter().any(|built| name == *built);
        if !is_built {
            copy_tree(&path, &to.join(name))?;
        }
    }
    Ok(())
}

fn copy_file(from: &Path, to: &Path) -> Result<(), Failure> {
    let content = fs::read(from).map_err(|error| failed("read", from, &error))?;
    if fs::read(to).is_ok_and(|old| old == content) {
        return Ok(());
    }
    write(to, &content)
}

fn write(to: &Path, content: &[u8]) -> Result<(), Failure> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(|error| failed("create", parent, &error))?;
    }
    fs::write(to, content).map_err(|error| failed("write", to, &error))
}

fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| failed("read", path, &error))
}

fn failed(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::Failed(format!("cannot {what} {}: {error}", path.display()))
}

impl Planted {
    fn path_in(&self, root: &Path) -> PathBuf {
        root.join("crates/leasehold/src").join(self.file)
    }

    /// The file with the bug in it. The text to replace occurs exactly once.
    fn apply(&self, sound: &str) -> Result<String, Failure> {
        match sound.matches(self.find).count() {
            1 => Ok(sound.replacen(self.find, self.replace, 1)),
            count => Err(Failure::Failed(format!("`{}`: its text occurs {count} times in {}", self.name, self.file))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_planted_bug_still_fits_the_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace is one above");
        for bug in PLANTED {
            let sound = read(&bug.path_in(root)).expect("a source file");
            let with_bug = bug.apply(&sound).expect("fits once");
            assert_ne!(sound, with_bug, "{}", bug.name);
        }
        assert!(PLANTED.len() >= 12);
    }

    #[test]
    fn the_arguments_say_what_to_simulate() {
        let parse = |text: &str| parse(&text.split_whitespace().map(String::from).collect::<Vec<_>>());
        assert_eq!(parse("--seeds 7").expect("seeds"), Asked::Seeds(7));
        assert_eq!(parse("--seed 7").expect("a seed"), Asked::Seed(7));
        assert_eq!(parse("").expect("nothing"), Asked::Seeds(SEEDS));
        for wrong in ["--seeds x", "--seeds", "--planted 1", "--quick --planted", "--sed 7", "7"] {
            assert!(matches!(parse(wrong), Err(Failure::Usage(_))), "{wrong}");
        }
        for both in ["--seeds 100 --seed 7", "--seed 7 --seeds 100"] {
            let error = parse(both).expect_err("one of the two").to_string();
            assert!(error.contains("one of the two"), "{error}");
        }
    }

    #[test]
    fn a_failing_run_is_read() {
        let output = "thread panicked\nseed 12: two holders of \"a\" at 3.000 s\nafter 13 seeds\n\nseed 12: …";
        let found = Found::read(output).expect("a failure");
        assert_eq!((found.seed, found.seeds, found.violation), ("12", "13", "two holders of \"a\" at 3.000 s"));
        assert!(Found::read("test result: ok").is_none());
    }
}

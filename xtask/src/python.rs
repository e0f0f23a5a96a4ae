//! Builds, checks, tests and measures the Python package.

use std::path::Path;
use std::process::Command;

use crate::steps::{self, Step};
use crate::tools::Tools;
use crate::workspace::{Failure, Workspace};

/// Runs `cargo xtask python`.
pub(crate) fn test(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let full = crate::flag(arguments, "--full")?;
    let tools = Tools::new(workspace);
    tools.c_compiler()?;
    tools.redis_server()?;
    let python = tools.python_for_the_package()?;
    let mut plan = steps(workspace, &python, &workspace.target.join("state"));
    if full {
        let mut again = tests(workspace, &python, &workspace.target.join("state"));
        again.arg("--full");
        plan.push(Step::run("Python, in full", again));
    }
    steps::run_all(workspace, plan)
}

/// Runs `cargo xtask python-bench`.
pub(crate) fn bench(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    crate::none(arguments)?;
    let tools = Tools::new(workspace);
    tools.c_compiler()?;
    tools.redis_server()?;
    let python = tools.python_for_the_package()?;
    // Optimised, as it is installed.
    steps::run_one(workspace, install(workspace, &python, "release"))?;
    let mut bench = workspace.command(&python);
    bench.arg("python/bench/against_redis_py.py");
    steps::run_one(workspace, bench)
}

/// Builds it unoptimised, because an optimised build takes longer than the tests would save.
pub(crate) fn steps(workspace: &Workspace, python: &Path, state: &Path) -> Vec<Step> {
    let module = |arguments: &[&str]| {
        let mut command = workspace.command(python);
        command.arg("-m").args(arguments);
        command
    };
    vec![
        Step::run("Python package", install(workspace, python, "dev")),
        Step::run("Python tests", tests(workspace, python, state)),
        Step::run("Python types", module(&["mypy", "--config-file", "python/pyproject.toml", "python"])),
        Step::run("Python stubs", module(&["mypy.stubtest", "leasehold._native"])),
    ]
}

/// Installs the package like `pip install ./python`, but with the tools of the environment and with the workspace's profile and
/// target directory, so that nothing is compiled again.
fn install(workspace: &Workspace, python: &Path, profile: &str) -> Command {
    let mut pip = workspace.command(python);
    pip.args(["-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", "--no-build-isolation", "./python"]);
    pip.env("MATURIN_PEP517_ARGS", format!("--profile {profile}")).env("CARGO_TARGET_DIR", &workspace.target);
    // pip finds maturin in `PATH`.
    let tools = python.parent().map(Path::to_path_buf);
    let path = std::env::var_os("PATH").unwrap_or_default();
    if let Ok(path) = std::env::join_paths(tools.into_iter().chain(std::env::split_paths(&path))) {
        pip.env("PATH", path);
    }
    pip
}

/// Runs the tests, and the examples of the docstrings and guides.
fn tests(workspace: &Workspace, python: &Path, state: &Path) -> Command {
    let mut pytest = workspace.command(python);
    pytest.args(["-m", "pytest", "-q", "-c", "python/pyproject.toml", "--doctest-modules", "python/tests"]);
    // The tests mostly wait, for leases to end and workers to start.
    pytest.args(["-n", "4", "--pyargs", "leasehold"]).env("XDG_STATE_HOME", state);
    pytest
}

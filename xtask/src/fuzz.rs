//! Tests the server against its OpenAPI document.

use std::process::Command;

use crate::steps;
use crate::tools::Tools;
use crate::workspace::{Failure, Workspace};

/// The number of cases of `cargo xtask test`, and the default of `api-fuzz`.
const CASES: u32 = 2_000;

/// `cargo xtask api-fuzz`
pub(crate) fn fuzz(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let cases = match arguments {
        [] => CASES,
        [flag, number] if flag == "--cases" => {
            number.parse().map_err(|_| Failure::Usage(format!("`{number}` is not a number of cases")))?
        }
        _ => return Err(Failure::Usage(format!("`{}` is not known here", arguments.join(" ")))),
    };
    let tools = Tools::new(workspace);
    tools.c_compiler()?;
    tools.redis_server()?;
    let command = fuzz_command(workspace, &tools, cases)?;
    // With all features, like `test` builds it.
    steps::run_one(workspace, workspace.cargo(&["build", "--workspace", "--all-features", "--bin", "leasehold"]))?;
    steps::run_one(workspace, command)
}

/// Returns the command, for a program that is already built.
pub(crate) fn step(workspace: &Workspace, tools: &Tools<'_>) -> Result<Command, Failure> {
    let mut command = fuzz_command(workspace, tools, CASES)?;
    // The same requests each time, so that a change does not fail at random.
    command.arg("1");
    Ok(command)
}

fn fuzz_command(workspace: &Workspace, tools: &Tools<'_>, cases: u32) -> Result<Command, Failure> {
    let mut command = workspace.command(&tools.python_with_schemathesis()?);
    command.arg("xtask/api_fuzz.py").arg(workspace.target.join("debug/leasehold")).arg(cases.to_string());
    Ok(command)
}

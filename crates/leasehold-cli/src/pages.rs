//! `completions` and `man`, generated from the command definitions.

use std::fs;
use std::path::Path;

use clap::{Command, CommandFactory};

use crate::cli::Cli;
use crate::exit::{Exit, Failure};
use crate::output;

/// Prints the completion script of a shell.
pub(crate) fn completions(shell: clap_complete::Shell) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "leasehold", &mut script);
    output::data(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Done)
}

/// Prints the manual page, or writes one per command into a directory.
pub(crate) fn man(out: Option<&Path>) -> Result<Exit, Failure> {
    let mut command = Cli::command();
    command.build();
    let Some(dir) = out else {
        output::data(&page(command)?)?;
        return Ok(Exit::Done);
    };
    let mut pages = vec![command.clone()];
    while let Some(command) = pages.pop() {
        let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
        pages.extend(command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help").cloned());
        let path = dir.join(format!("{name}.1"));
        let text = page(command)?;
        fs::write(&path, text).map_err(|error| Failure::new(Exit::Output, format!("{}: {error}", path.display())))?;
    }
    Ok(Exit::Done)
}

fn page(command: Command) -> Result<String, Failure> {
    let mut page = Vec::new();
    let rendered = clap_mangen::Man::new(command).render(&mut page);
    rendered.map_err(|error| Failure::new(Exit::Output, format!("the manual page: {error}")))?;
    Ok(String::from_utf8_lossy(&page).into_owned())
}

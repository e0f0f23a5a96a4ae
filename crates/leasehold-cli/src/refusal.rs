//! What clap's refusals look like here: one line, with what to do next.

use std::error::Error as _;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// clap's message and its first tip, in one line.
pub(crate) fn in_one_line(error: &clap::Error) -> String {
    let argument = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(argument)) => argument.as_str(),
        _ => "",
    };
    let text = error.render().to_string();
    match (error.kind(), error.source()) {
        (ErrorKind::ValueValidation, Some(source)) => format!("{argument}: {source}"),
        (ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand, _) => {
            format!("no command was given; see {} --help", refused_command(&text))
        }
        // What is meant for CMD stands behind `--`, so anything unknown before it may be CMD itself.
        (ErrorKind::UnknownArgument, _) if !argument.starts_with('-') && without_dashes("run") => {
            format!("write -- before the command: leasehold run NAME -- {argument} …")
        }
        (ErrorKind::UnknownArgument, _) if !argument.starts_with('-') && without_dashes("once") => {
            format!("write -- before the command: leasehold once ID -- {argument} …")
        }
        _ => {
            let usage = |part: &&str| !part.starts_with("Usage:") && !part.starts_with("For more");
            let said = text.split("\n\n").take_while(usage).map(|part| match part.trim_start().strip_prefix("tip: ") {
                Some(tips) => one_line(tips.lines().next().unwrap_or(tips)),
                None => one_line(part),
            });
            let said = said.collect::<Vec<_>>().join("; ");
            format!("{}; see {} --help", said.strip_prefix("error: ").unwrap_or(&said), refused_command(&text))
        }
    }
}

/// The command whose usage clap shows below its message: `leasehold keys create`.
fn refused_command(text: &str) -> String {
    let usage = text.lines().find_map(|line| line.strip_prefix("Usage: ")).unwrap_or("leasehold");
    let names = usage.split(' ').take_while(|word| word.starts_with(|c: char| c.is_ascii_lowercase()));
    names.collect::<Vec<_>>().join(" ")
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn without_dashes(command: &str) -> bool {
    let mut args = std::env::args_os().skip(1);
    args.any(|arg| arg == command) && !args.any(|arg| arg == "--")
}

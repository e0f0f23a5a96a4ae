//! The message about a wrong command line: one line, with the next step.

use std::error::Error as _;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Returns clap's message and its first tip in one line.
pub(crate) fn one_line_message(error: &clap::Error) -> String {
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
        // CMD follows `--`, so an unknown word before it may be CMD itself.
        (ErrorKind::UnknownArgument, _) if !argument.starts_with('-') && without_dashes("run") => {
            format!("write -- before the command: leasehold run NAME -- {argument} …")
        }
        (ErrorKind::UnknownArgument, _) if !argument.starts_with('-') && without_dashes("once") => {
            format!("write -- before the command: leasehold once ID -- {argument} …")
        }
        _ => {
            let usage = |part: &&str| !part.starts_with("Usage:") && !part.starts_with("For more");
            let parts =
                text.split("\n\n").take_while(usage).map(|part| match part.trim_start().strip_prefix("tip: ") {
                    Some(tips) => one_line(tips.lines().next().unwrap_or(tips)),
                    None => one_line(part),
                });
            let message = parts.collect::<Vec<_>>().join("; ");
            format!("{}; see {} --help", message.strip_prefix("error: ").unwrap_or(&message), refused_command(&text))
        }
    }
}

/// Returns the command whose usage clap shows below its message, such as `leasehold keys create`.
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

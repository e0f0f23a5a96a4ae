//! The command sink: runs a program with the alert as JSON on its standard input and in its environment.

use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::alert::Notice;
use super::settings::AlertCommand;

/// How much of a failing program's stderr is logged.
const MAX_STDERR_BYTES: u64 = 1_000;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    #[error("it cannot be run: {0}")]
    NotRun(std::io::Error),
    #[error("it did not end in time, and was killed")]
    TooSlow,
    #[error("it ended with {0}: {1}")]
    Ended(ExitStatus, String),
}

/// Runs the command and waits until it ends.
pub(super) async fn run(command: &AlertCommand, notice: &Notice) -> Result<(), CommandError> {
    let mut child = spawn(command, notice).map_err(CommandError::NotRun)?;
    // Kill its process group, so that its children end too.
    let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    let ended = tokio::time::timeout(command.timeout, finish(&mut child, notice)).await;
    match ended {
        Ok(Ok((status, _))) if status.success() => Ok(()),
        Ok(Ok((status, stderr_text))) => Err(CommandError::Ended(status, stderr_text)),
        Ok(Err(error)) => Err(CommandError::NotRun(error)),
        Err(_) => {
            if let Some(group) = group {
                let _ = kill_process_group(group, Signal::KILL);
            }
            let _ = child.kill().await;
            Err(CommandError::TooSlow)
        }
    }
}

fn spawn(command: &AlertCommand, notice: &Notice) -> std::io::Result<Child> {
    let words = &command.run.0;
    let mut program = if command.shell {
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(&words[0]);
        shell
    } else {
        let mut program = Command::new(&words[0]);
        program.args(&words[1..]);
        program
    };
    // The server's own variables may contain secrets: store passwords, keys.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LEASEHOLD_") {
            program.env_remove(name);
        }
    }
    let alert = &notice.alert;
    let state = notice.state.as_str();
    let given = [
        ("LEASEHOLD_ALERT_ID", Some(alert.id.as_str())),
        ("LEASEHOLD_ALERT_STATE", Some(state)),
        ("LEASEHOLD_ALERT_TYPE", Some(&alert.kind)),
        ("LEASEHOLD_ALERT_LEVEL", Some(alert.level.as_str())),
        ("LEASEHOLD_ALERT_MESSAGE", Some(alert.message.as_str())),
        ("LEASEHOLD_ALERT_NAME", alert.name.as_deref()),
        ("LEASEHOLD_ALERT_OWNER", alert.owner.as_deref()),
        ("LEASEHOLD_ALERT_HOLDER_ID", alert.holder_id.as_deref()),
    ];
    for (variable, value) in given {
        // An environment variable cannot contain a NUL.
        program.env(variable, value.unwrap_or("").replace('\0', ""));
    }
    program.env("LEASEHOLD_ALERT_VALUE", alert.value.map_or_else(String::new, |value| value.to_string()));
    program.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0).kill_on_drop(true);
    program.spawn()
}

async fn finish(child: &mut Child, notice: &Notice) -> std::io::Result<(ExitStatus, String)> {
    let json = notice.to_json() + "\n";
    let stdin = child.stdin.take();
    let stderr = child.stderr.take();
    let write = async {
        if let Some(mut stdin) = stdin {
            // The program need not read its input.
            let _ = stdin.write_all(json.as_bytes()).await;
        }
    };
    let read = async {
        let mut stderr_text = Vec::new();
        if let Some(mut stderr) = stderr {
            let _ = (&mut stderr).take(MAX_STDERR_BYTES).read_to_end(&mut stderr_text).await;
            // Discard the rest: a full pipe would block the program.
            let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
        }
        stderr_text
    };
    let ((), stderr_text, status) = tokio::join!(write, read, child.wait());
    let stderr_text = String::from_utf8_lossy(&stderr_text).chars().filter(|c| !c.is_control() || *c == ' ').collect();
    Ok((status?, stderr_text))
}

//! An alert for a program: as JSON on its standard input, and in its environment.

use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::board::{Notice, State};
use super::settings::AlertCommand;

/// How much of what a failing program says is repeated in the log.
const SAID_BYTES: u64 = 1_000;

/// Why it did not work.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    #[error("it cannot be run: {0}")]
    NotRun(#[from] std::io::Error),
    #[error("it did not end in time, and was killed")]
    TooSlow,
    #[error("it ended with {0}: {1}")]
    Ended(ExitStatus, String),
}

/// Runs it and waits for its end.
pub(super) async fn run(command: &AlertCommand, notice: &Notice) -> Result<(), Failed> {
    let mut child = spawn(command, notice)?;
    // Its group, so that what it started ends with it.
    let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    let ended = tokio::time::timeout(command.timeout, finish(&mut child, notice)).await;
    match ended {
        Ok(Ok((status, _))) if status.success() => Ok(()),
        Ok(Ok((status, said))) => Err(Failed::Ended(status, said)),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => {
            if let Some(group) = group {
                let _ = kill_process_group(group, Signal::KILL);
            }
            let _ = child.kill().await;
            Err(Failed::TooSlow)
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
    // What the server was told may be secret: passwords of stores, keys.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LEASEHOLD_") {
            program.env_remove(name);
        }
    }
    let alert = &notice.alert;
    let state = if notice.state == State::Firing { "firing" } else { "resolved" };
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
        // No variable can hold a NUL.
        program.env(variable, value.unwrap_or("").replace('\0', ""));
    }
    program.env("LEASEHOLD_ALERT_VALUE", alert.value.map_or_else(String::new, |value| value.to_string()));
    program.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0).kill_on_drop(true);
    program.spawn()
}

async fn finish(child: &mut Child, notice: &Notice) -> std::io::Result<(ExitStatus, String)> {
    let json = serde_json::to_string(notice).expect("a notice is JSON") + "\n";
    let stdin = child.stdin.take();
    let stderr = child.stderr.take();
    let write = async {
        if let Some(mut stdin) = stdin {
            // A program that does not read it does not have to.
            let _ = stdin.write_all(json.as_bytes()).await;
        }
    };
    let read = async {
        let mut said = Vec::new();
        if let Some(mut stderr) = stderr {
            let _ = (&mut stderr).take(SAID_BYTES).read_to_end(&mut said).await;
            // The rest is read and forgotten: a full pipe would stop it.
            let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
        }
        said
    };
    let ((), said, status) = tokio::join!(write, read, child.wait());
    let said = String::from_utf8_lossy(&said).chars().filter(|c| !c.is_control() || *c == ' ').collect();
    Ok((status?, said))
}

//! Processes that use locks and can be killed while they hold one.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::signal::send_signal;

const WAIT_POLL: Duration = Duration::from_millis(2);

/// A worker process. It receives its job as one JSON argument and reports by lines of JSON. Killed on drop.
///
/// Its standard error is that of the test.
#[derive(Debug)]
pub struct WorkerProcess {
    child: Child,
    /// Set once the process was waited for. After that its process id may be reused.
    ended: Option<ExitStatus>,
    stdin: Option<ChildStdin>,
    lines: UnboundedReceiver<Value>,
}

impl WorkerProcess {
    /// Starts `binary` with `spec` as its first argument.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn spawn(binary: impl AsRef<Path>, spec: &impl Serialize) -> Self {
        let spec = serde_json::to_string(spec).expect("a spec is plain data");
        Self::run(Command::new(binary.as_ref()).arg(spec))
    }

    /// Starts any command.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn run(command: &mut Command) -> Self {
        let mut child = command
            // A killed process would leave an incomplete coverage file, which no tool can read.
            .env("LLVM_PROFILE_FILE", "/dev/null")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start the worker {command:?}: {error}"));
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().expect("stdout was piped");
        let (sender, lines) = unbounded_channel();
        // The thread ends with the worker's output, so it is not joined.
        std::thread::spawn(move || read_lines(stdout, &sender));
        Self { child, ended: None, stdin, lines }
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Writes a line to its standard input. Ignored if the worker has ended.
    pub fn send_line(&mut self, line: &str) {
        if let Some(stdin) = &mut self.stdin {
            let _ = stdin.write_all(format!("{line}\n").as_bytes());
        }
    }

    /// Closes its standard input.
    pub fn close_input(&mut self) {
        self.stdin = None;
    }

    /// Waits for its next line of output; `None` if it has ended or wrote nothing in time. A line that is not JSON becomes a
    /// string.
    pub async fn next_line(&mut self, within: Duration) -> Option<Value> {
        tokio::time::timeout(within, self.lines.recv()).await.ok().flatten()
    }

    /// Skips lines until one matches; `None` if the worker has ended or no line matched in time.
    pub async fn wait_for_line(&mut self, wanted: impl Fn(&Value) -> bool, within: Duration) -> Option<Value> {
        let found = async {
            loop {
                let line = self.lines.recv().await?;
                if wanted(&line) {
                    return Some(line);
                }
            }
        };
        tokio::time::timeout(within, found).await.ok().flatten()
    }

    /// Kills it with SIGKILL and waits until it has ended. Earlier output can still be read.
    pub fn kill9(&mut self) {
        if self.ended.is_none() {
            // Neither fails for a child that was not waited for.
            let _ = self.child.kill();
            self.ended = self.child.wait().ok();
        }
    }

    /// Stops it with SIGSTOP.
    pub fn pause(&mut self) {
        self.signal(Signal::STOP);
    }

    /// Resumes it with SIGCONT.
    pub fn resume(&mut self) {
        self.signal(Signal::CONT);
    }

    /// Waits until it ends by itself; `None` if it has not ended in time.
    pub async fn wait(&mut self, within: Duration) -> Option<ExitStatus> {
        let give_up_at = Instant::now() + within;
        while self.exited().is_none() && Instant::now() < give_up_at {
            tokio::time::sleep(WAIT_POLL).await;
        }
        self.ended
    }

    fn signal(&mut self, signal: Signal) {
        if self.exited().is_none() {
            send_signal(self.pid(), signal);
        }
    }

    fn exited(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        self.kill9();
    }
}

fn read_lines(stdout: ChildStdout, lines: &UnboundedSender<Value>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        let value = serde_json::from_str(&line).unwrap_or(Value::String(line));
        if lines.send(value).is_err() {
            return;
        }
    }
}

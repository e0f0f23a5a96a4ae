//! Runs the real command with its own home directory.
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::Path;
use std::process::{Command, Output, Stdio};

use leasehold_testkit::RedisServer;
use serde_json::Value;

/// A store and a home directory for the command, removed when dropped.
pub(crate) struct Place {
    pub(crate) store: String,
    pub(crate) home: tempfile::TempDir,
    pub(crate) server: Option<RedisServer>,
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Place {
    pub(crate) fn sqlite() -> Self {
        let home = tempfile::tempdir().expect("a directory");
        let store = format!("sqlite:{}", home.path().join("locks.db").display());
        Self { store, home, server: None }
    }

    pub(crate) async fn redis() -> Self {
        let server = RedisServer::start().await;
        Self { store: server.url(), home: tempfile::tempdir().expect("a directory"), server: Some(server) }
    }

    /// Returns a place for each kind of store.
    pub(crate) async fn each() -> [Self; 2] {
        [Self::sqlite(), Self::redis().await]
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = bare(args);
        command.env("LEASEHOLD_STORE", &self.store).env("HOME", self.home.path());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        ran(self.command(args))
    }

    /// Runs a command that must succeed. Returns its stdout.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
        ran.out
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let mut args = args.to_vec();
        args.push("--json");
        let out = self.ok(&args);
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?} said {out:?}: {e}"))
    }

    pub(crate) fn with_token(&self, token: &str, args: &[&str]) -> Ran {
        let mut command = self.command(args);
        command.env("LEASEHOLD_TOKEN", token);
        ran(command)
    }

    pub(crate) async fn manager(&self) -> leasehold::LockManager {
        leasehold::LockManager::connect(&self.store).await.expect("a store")
    }
}

/// Returns the command with an empty environment.
pub(crate) fn bare(args: &[&str]) -> Command {
    // Performance tests use another build.
    let program = std::env::var_os("LEASEHOLD_TEST_PROGRAM");
    let mut command = Command::new(program.unwrap_or_else(|| env!("CARGO_BIN_EXE_leasehold").into()));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).args(args).stdin(Stdio::null());
    command
}

pub(crate) fn ran(mut command: Command) -> Ran {
    let Output { status, stdout, stderr } = command.output().expect("it starts");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    Ran { code: status.code().unwrap_or(-1), out: text(stdout), err: text(stderr) }
}

/// Runs the command in a terminal and types into it. `out` is the terminal's content.
pub(crate) fn in_terminal(place: &Place, args: &[&str], typed: &str) -> Ran {
    let binary = Path::new(env!("CARGO_BIN_EXE_leasehold"));
    let line: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
    let mut script = Command::new("script");
    script.args(["-q", "-e", "-c", &format!("{} {}", binary.display(), line.join(" ")), "/dev/null"]);
    script.env("LEASEHOLD_STORE", &place.store).env("HOME", place.home.path()).env_remove("LEASEHOLD_TOKEN");
    script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = script.spawn().expect("script(1) runs");
    let mut input = child.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut input, typed.as_bytes()).expect("typed");
    let out = child.wait_with_output().expect("it ends");
    drop(input);
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ran { code: out.status.code().unwrap_or(-1), out: text(out.stdout), err: text(out.stderr) }
}

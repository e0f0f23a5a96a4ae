//! The workspace, and commands that run in it.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Why a command failed: wrong usage (exit code 2) or another failure (exit code 1).
#[derive(Debug)]
pub(crate) enum Failure {
    Usage(String),
    Failed(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(reason) | Failure::Failed(reason) => f.write_str(reason),
        }
    }
}

/// The checkout on which the commands work.
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
}

impl Workspace {
    /// Finds the workspace, the parent of this package's directory, which Cargo passes.
    pub(crate) fn from_env() -> Result<Workspace, Failure> {
        let failed = || Failure::Failed(String::from("start this with `cargo xtask`"));
        let package = std::env::var_os("CARGO_MANIFEST_DIR").ok_or_else(failed)?;
        let root = Path::new(&package).parent().ok_or_else(failed)?.to_path_buf();
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(elsewhere) => std::env::current_dir().map_err(|_| failed())?.join(elsewhere),
            None => root.join("target"),
        };
        Ok(Workspace { root, target })
    }

    pub(crate) fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(Path::new("cargo"));
        command.args(arguments);
        command
    }

    /// Returns the sorted names of a crate's test programs: files, and directories with a `main.rs`.
    pub(crate) fn tests_of(&self, krate: &str) -> Result<Vec<String>, Failure> {
        let dir = self.root.join("crates").join(krate).join("tests");
        let entries = std::fs::read_dir(&dir)
            .map_err(|error| Failure::Failed(format!("cannot read {}: {error}", self.relative(&dir))))?;
        let name_of = |path: PathBuf| {
            let is_program = path.extension().is_some_and(|ending| ending == "rs") || path.join("main.rs").exists();
            is_program.then(|| path.file_stem()?.to_str().map(str::to_owned)).flatten()
        };
        let mut names: Vec<String> = entries.filter_map(|entry| name_of(entry.ok()?.path())).collect();
        names.sort();
        Ok(names)
    }

    /// Creates a command that runs in the root of the workspace.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        // Variables of `cargo run` describe this package, not the packages that are built next. Build scripts that watch them
        // would run again each time.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
                command.env_remove(&name);
            }
        }
        if std::env::var_os("CARGO_TARGET_DIR").is_some() {
            command.env("CARGO_TARGET_DIR", &self.target);
        }
        command
    }

    /// Returns the command as typed in the root of the workspace.
    pub(crate) fn shown(&self, command: &Command) -> String {
        let set = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
        let words = set
            .map(|(name, value)| format!("{}={}", name.to_string_lossy(), self.word(value)))
            .chain([self.word(command.get_program())])
            .chain(command.get_args().map(|argument| self.word(argument)));
        words.collect::<Vec<_>>().join(" ")
    }

    /// Returns a path relative to the root of the workspace.
    pub(crate) fn relative<'a>(&self, path: &'a Path) -> std::path::Display<'a> {
        path.strip_prefix(&self.root).unwrap_or(path).display()
    }

    fn word(&self, text: &OsStr) -> String {
        let word = self.relative(Path::new(text)).to_string();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            return word;
        }
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_shown_as_they_would_be_typed() {
        let workspace = Workspace { root: "/somewhere".into(), target: "/somewhere/target".into() };
        let mut command = Command::new("cargo");
        command.args(["test", "-p", "a b", "it's", ""]);
        command.env("RUSTDOCFLAGS", "-D warnings").env_remove("CARGO_PKG_NAME");
        command.env("SERVER", "/somewhere/target/tools/server");
        assert_eq!(
            workspace.shown(&command),
            r"RUSTDOCFLAGS='-D warnings' SERVER=target/tools/server cargo test -p 'a b' 'it'\''s' ''"
        );
    }
}

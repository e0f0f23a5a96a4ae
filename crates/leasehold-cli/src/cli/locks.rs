//! The commands on locks: `claim`, `acquire`, `renew`, `release`, `evict`, `ls`, `why` and `gpus`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use leasehold::LockName;
use leasehold::bindings::Retention;
use leasehold::inspect::HolderId;
use leasehold::lease::Ttl;

use super::{parse_holder_id, parse_name, parse_request_id};
use crate::duration;

/// Acquire a lock for a script, and print its token and fence
///
/// The lease is not tied to a process: it ends after its ttl unless the script renews or releases it with
/// the token. If the work is a single command, `leasehold run` is safer.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  lease=$(leasehold acquire deploy --ttl 10m) || exit      75: held by another
  export LEASEHOLD_TOKEN=\"${lease%%[!A-Za-z0-9_-]*}\"       its first line
  leasehold renew deploy || exit                           76: lost, so stop
  leasehold release deploy

Prints the token on the first line and the fence on the second. Keep the token secret: it alone can
renew and release the lock.")]
pub(crate) struct AcquireArgs {
    /// The name of the lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
    /// The length of the lease (500ms, 30s, 5m, 1h; at most 24h)
    #[arg(long, value_name = "D", value_parser = duration::parse_ttl)]
    pub(crate) ttl: Ttl,
    /// Wait at most this long for the lock [default: do not wait, exit with 75 if it is held]
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) wait: Option<Duration>,
    /// The name to show as the holder [default: the parent process's name]
    #[arg(long, value_name = "S")]
    pub(crate) owner: Option<String>,
}

/// Where the token comes from. A file or the environment keeps it out of the process list.
#[derive(Debug, Args)]
pub(crate) struct TokenArgs {
    /// The token that `acquire` printed; visible in the process list
    #[arg(long, value_name = "T", conflicts_with = "token_file")]
    pub(crate) token: Option<String>,
    /// Read the token from the first line of a file (- is stdin) [default: $LEASEHOLD_TOKEN]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,
}

/// Renew a lease from `acquire`
///
/// Exits with 76 if the token does not hold the lock (any more), or the lease was revoked.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold renew deploy --token-file ./token
  LEASEHOLD_TOKEN=… leasehold renew deploy --ttl 10m")]
pub(crate) struct RenewArgs {
    /// The name of the lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
    #[command(flatten)]
    pub(crate) token: TokenArgs,
    /// The length of the lease from now on; never shortens it [default: the ttl of the lease]
    #[arg(long, value_name = "D", value_parser = duration::parse_ttl)]
    pub(crate) ttl: Option<Ttl>,
}

/// Release a lock from `acquire`
///
/// Exits with 76, and changes nothing, if the token does not hold the lock (any more).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold release deploy --token-file ./token
  LEASEHOLD_TOKEN=… leasehold release deploy")]
pub(crate) struct ReleaseArgs {
    /// The name of the lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
    #[command(flatten)]
    pub(crate) token: TokenArgs,
}

/// Bind a value to an id unless one is bound already, and print the bound value
///
/// One atomic step that never waits. The first call binds its value; all others get that value until the
/// lease is over. Exits with 0 either way.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  job=$(leasehold claim request-7 \"job-$$\" --lease 10m)     every caller gets the same job
  leasehold claim request-7 \"$HOSTNAME\" --lease 1m --json | jq -e .created && ./create.sh")]
pub(crate) struct ClaimArgs {
    /// The id of the request
    #[arg(value_parser = parse_request_id)]
    pub(crate) id: LockName,
    /// The value to bind, at most 1 MiB
    #[arg(allow_hyphen_values = true)]
    pub(crate) value: String,
    /// How long the value stays bound (1s, 10m, 24h, 7d)
    #[arg(long, value_name = "D", value_parser = duration::parse_keep)]
    pub(crate) lease: Retention,
}

/// Take a lock away from its holder
///
/// Revokes by default: the holder is told to stop, its renewals are rejected, and the lock passes on when
/// it releases or its lease ends. There are never two holders. --force frees the lock at once: the holder
/// is not notified and may still be working, so only fences protect what it writes.
///
/// Only the current holder is evicted: if the lock changes hands in the meantime, nothing is done (exit
/// 76). A lock that is already free is not an error (exit 0).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold evict gpu_lock:0 --reason 'stuck since noon'
  leasehold evict gpu_lock:0 --expect 7f3a91c2b04d --force --yes")]
pub(crate) struct EvictArgs {
    /// The name of the lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
    /// Evict only this holder (the id that `why` shows)
    #[arg(long, value_name = "HOLDER_ID", value_parser = parse_holder_id)]
    pub(crate) expect: Option<HolderId>,
    /// Free the lock at once; use it for a holder that is known to be dead
    #[arg(long)]
    pub(crate) force: bool,
    /// The reason, shown in the events
    #[arg(long, value_name = "S", default_value = "by hand", hide_default_value = true)]
    pub(crate) reason: String,
    /// Do not ask for confirmation
    #[arg(long, short)]
    pub(crate) yes: bool,
}

/// List the locks that are held
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold ls
  leasehold ls gpu_lock: --watch
  leasehold ls --json | jq -r '.[] | select(.waiters != []) | .name'

SEEN is the last sign of life: when the lease was acquired or last renewed.")]
pub(crate) struct LsArgs {
    /// List only names with this prefix
    #[arg(value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,
    /// Refresh every second until interrupted
    #[arg(long, short)]
    pub(crate) watch: bool,
}

/// Show who holds a lock, since when, whether it is alive, and who waits
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold why nightly-report
  leasehold why --json gpu_lock:0 | jq .owner")]
pub(crate) struct WhyArgs {
    /// The name of the lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
}

/// List the GPUs of this machine: memory, who holds them, who waits
///
/// The devices come from the NVIDIA driver, else from CUDA_VISIBLE_DEVICES, else from --gpus. Without any
/// of these, lists the GPU locks that are held in the store.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold gpus
  leasehold gpus --json | jq '.gpus[] | select(.lock.held | not) | .id'")]
pub(crate) struct GpusArgs {
    /// The number of GPUs, if no driver reports it
    #[arg(long, value_name = "N")]
    pub(crate) gpus: Option<u32>,
}

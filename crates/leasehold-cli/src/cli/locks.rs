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

/// Take a lock for a script, and print its token and fence
///
/// Such a lease belongs to no process: it ends with its ttl, unless the script renews or releases it with
/// the token. Where a single command can be wrapped, `leasehold run` is the safer way.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  taken=$(leasehold acquire deploy --ttl 10m) || exit      75: held by another
  export LEASEHOLD_TOKEN=\"${taken%%[!A-Za-z0-9_-]*}\"       its first line
  leasehold renew deploy || exit                           76: lost, so stop
  leasehold release deploy

Prints the token on the first line and the fence on the second. Keep the token secret: it alone can
renew and release the lock.")]
pub(crate) struct AcquireArgs {
    /// The lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
    /// How long the lease lasts unless it is renewed (500ms, 30s, 5m, 1h; at most 24h)
    #[arg(long, value_name = "D", value_parser = duration::parse_ttl)]
    pub(crate) ttl: Ttl,
    /// Wait at most this long for the lock; without it, end with 75 when it is held
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) wait: Option<Duration>,
    /// The name of the holder, as others see it [default: the parent process's name]
    #[arg(long, value_name = "S")]
    pub(crate) owner: Option<String>,
}

/// The source of a token: every user can read the process list, so there are others than an option.
#[derive(Debug, Args)]
pub(crate) struct TokenArgs {
    /// The token that `acquire` printed; visible to all users who can list processes
    #[arg(long, value_name = "T", conflicts_with = "token_file")]
    pub(crate) token: Option<String>,
    /// Read the token from the first line of a file (- is stdin) [default: $LEASEHOLD_TOKEN]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,
}

/// Renew a lease that `acquire` took
///
/// Ends with 76 when the lock is not, or no longer, held by that token, or was revoked.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold renew deploy --token-file ./token
  LEASEHOLD_TOKEN=… leasehold renew deploy --ttl 10m")]
pub(crate) struct RenewArgs {
    /// The lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
    #[command(flatten)]
    pub(crate) token: TokenArgs,
    /// How long it lasts from now; never shortens it [default: the ttl of the lease]
    #[arg(long, value_name = "D", value_parser = duration::parse_ttl)]
    pub(crate) ttl: Option<Ttl>,
}

/// Release a lock that `acquire` took
///
/// Ends with 76 when the lock is not, or no longer, held by that token; nothing is changed then.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold release deploy --token-file ./token
  LEASEHOLD_TOKEN=… leasehold release deploy")]
pub(crate) struct ReleaseArgs {
    /// The lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
    #[command(flatten)]
    pub(crate) token: TokenArgs,
}

/// Bind a value to an id unless one is bound already, and print the bound value
///
/// One atomic step, without a wait. The first call binds its value, and all others get that value until
/// the lease is over. Ends with 0 either way.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  job=$(leasehold claim request-7 \"job-$$\" --lease 10m)     every caller has the same job
  leasehold claim request-7 \"$HOSTNAME\" --lease 1m --json | jq -e .created && ./create.sh")]
pub(crate) struct ClaimArgs {
    /// The id of the request
    #[arg(value_parser = parse_request_id)]
    pub(crate) id: LockName,
    /// The value to bind, at most 1 MiB
    #[arg(allow_hyphen_values = true)]
    pub(crate) value: String,
    /// How long it stays bound (1s, 10m, 24h, 7d)
    #[arg(long, value_name = "D", value_parser = duration::parse_keep)]
    pub(crate) lease: Retention,
}

/// Take a lock away from its holder
///
/// Revokes by default: the holder is told to stop, its renewals are refused, and the lock passes on when
/// it releases or its lease ends. Never makes two holders. --force frees the lock at once: a holder that
/// is still at work is not told, and only fences protect what it writes.
///
/// Only the holder that was looked up is evicted: when the lock changes hands meanwhile, nothing is done
/// (exit 76). A lock that is free already is no error (exit 0).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold evict gpu_lock:0 --reason 'stuck since noon'
  leasehold evict gpu_lock:0 --expect 7f3a91c2b04d --force --yes")]
pub(crate) struct EvictArgs {
    /// The lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
    /// Only if this is still the holder (the id that `why` shows)
    #[arg(long, value_name = "HOLDER_ID", value_parser = parse_holder_id)]
    pub(crate) expect: Option<HolderId>,
    /// Free the lock at once, for a holder that is known to be dead
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

SEEN is the last sign of life: when the lease was taken or last renewed.")]
pub(crate) struct LsArgs {
    /// Only names that begin with this
    #[arg(value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,
    /// Repeat every second until interrupted
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
    /// The lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
}

/// List the GPUs of this machine: memory, who holds them, who waits
///
/// The devices come from the NVIDIA driver, else from CUDA_VISIBLE_DEVICES, else from --gpus. Without any
/// of them, lists the GPU locks that are held in the store.
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

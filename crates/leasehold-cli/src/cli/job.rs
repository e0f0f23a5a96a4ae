//! The commands that run another one: `run` and `once`.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};
use leasehold::LockName;
use leasehold::bindings::Retention;
use leasehold::lease::Ttl;

use super::{parse_name, parse_once_id};
use crate::duration;
use crate::gpu::GpuSelection;

/// Run a command while holding a lock
///
/// Waits for the lock, runs CMD, releases the lock when CMD ends, and ends with CMD's own exit code
/// (128+n for signal n). CMD sees LEASEHOLD_NAME and LEASEHOLD_FENCE.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold run nightly-report -- ./report.sh
  leasehold run --no-wait backup -- ./backup.sh || [ $? -eq 75 ]     skip when it runs already
  leasehold run --wait 5m --ttl 10s deploy -- make deploy
  leasehold run --no-wait --hold-at-least 50s cron -- ./short.sh     hosts whose clocks differ
  leasehold run --gpu any -- python train.py                         on whichever GPU is free first

Exit codes: CMD's own; 75 not acquired (-E changes it), 76 lease lost, 69 store unreachable,
64 usage, 78 configuration, 126 CMD cannot be started, 127 CMD not found.")]
pub(crate) struct RunArgs {
    /// How long the lock outlives a crash of this machine: the lease, renewed while CMD runs [default: 30s]
    #[arg(long, value_name = "D", value_parser = duration::parse_ttl)]
    pub(crate) ttl: Option<Ttl>,
    /// Wait at most this long for the lock (500ms, 30s, 5m, 1h); without it, wait without limit
    #[arg(long, value_name = "D", value_parser = duration::parse, conflicts_with = "no_wait")]
    pub(crate) wait: Option<Duration>,
    /// Do not wait: end with 75 when the lock is held
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// The name of the holder, as others see it [default: CMD's name]
    #[arg(long, value_name = "S")]
    pub(crate) owner: Option<String>,
    /// What happens to CMD when the lease is lost
    #[arg(long, value_enum, value_name = "kill|warn", default_value = "kill", hide_possible_values = true)]
    pub(crate) on_lost: OnLost,
    /// Time between SIGTERM and SIGKILL for a CMD whose lease is lost; it never reaches beyond the lease
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) grace: Option<Duration>,
    /// Keep the lock at least this long, even when CMD ends sooner
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) hold_at_least: Option<Duration>,
    /// The exit code when the lock is held by another [default: 75]
    #[arg(short = 'E', long = "conflict-exit-code", value_name = "CODE")]
    pub(crate) conflict_exit_code: Option<u8>,
    /// Run on a GPU instead, the only one that CMD sees: any, any:K, or numbers such as 0 or 0,3
    #[arg(long, value_name = "any|ID", value_parser = GpuSelection::parse, conflicts_with = "name")]
    pub(crate) gpu: Option<GpuSelection>,
    /// The number of GPUs, if no driver reports it
    #[arg(long, value_name = "N")]
    pub(crate) gpus: Option<u32>,
    /// The lock
    #[arg(value_parser = parse_name, required_unless_present = "gpu")]
    pub(crate) name: Option<LockName>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
    /// The terms of `once`, which stores CMD's result; not an option of `run`.
    #[arg(skip)]
    pub(crate) once: Option<OnceTerms>,
}

/// The terms of `once` beyond those of `run`.
#[derive(Debug, Clone)]
pub(crate) struct OnceTerms {
    pub(crate) id: LockName,
    pub(crate) keep: Retention,
    pub(crate) until_ok: bool,
}

impl RunArgs {
    /// Describes what the run waits for.
    pub(crate) fn wanted(&self) -> String {
        match (&self.gpu, &self.name) {
            (Some(gpu), _) => gpu.shown(),
            (None, Some(name)) => name.to_string(),
            (None, None) => String::new(),
        }
    }
}

/// What `run` does to its command when the lease is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    /// End it and all its children, before the lock can pass to another holder.
    Kill,
    /// Report it and let it run: only for work that checks its fence.
    Warn,
}

/// Run a command once across all machines; the others wait and get its output and exit code
///
/// The first call runs CMD under the lock once:ID and stores its output and exit code; calls in the
/// meantime wait for them, and later calls get them at once. A CMD that was killed, or whose machine
/// died, has no result: the next call runs it. CMD's output goes through a pipe, not to a terminal.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold once migrate-7 -- ./migrate.sh            on every machine that is deployed to
  leasehold once --keep 7d report-$(date +%F) -- ./report.sh
  leasehold once --until-ok fetch -- curl -fsS https://example.org/data     a failure is not stored
  leasehold once --forget migrate-7                   the next one runs it again

The first 480 KiB of each stream are stored; a call that gets less than was written says so on stderr.

Exit codes: CMD's own, the same for every call; 75 still running (-E changes it), 76 lease lost,
69 store unreachable, 64 usage, 78 configuration, 126 CMD cannot be started, 127 CMD not found.")]
pub(crate) struct OnceArgs {
    /// How long the result is kept (30s, 5m, 1h, 7d); after that the ID is new again
    #[arg(long, value_name = "D", value_parser = duration::parse_keep, default_value = "24h")]
    pub(crate) keep: Retention,
    /// Store only the result of a CMD that ends with 0; otherwise the next one runs it again
    #[arg(long)]
    pub(crate) until_ok: bool,
    /// Forget the stored result, and run nothing
    #[arg(long, conflicts_with_all = ["command", "until_ok", "wait", "no_wait"])]
    pub(crate) forget: bool,
    /// How long the lock outlives a crash of the machine that runs CMD [default: 30s]
    #[arg(long, value_name = "D", value_parser = duration::parse_ttl)]
    pub(crate) ttl: Option<Ttl>,
    /// Wait at most this long for the call that runs CMD; without it, wait without limit
    #[arg(long, value_name = "D", value_parser = duration::parse, conflicts_with = "no_wait")]
    pub(crate) wait: Option<Duration>,
    /// Do not wait: end with 75 while another call runs CMD
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// The name of the one that runs CMD, as others see it [default: CMD's name]
    #[arg(long, value_name = "S")]
    pub(crate) owner: Option<String>,
    /// Time between SIGTERM and SIGKILL for a CMD whose lease is lost; it never reaches beyond the lease
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) grace: Option<Duration>,
    /// The exit code while another call runs CMD [default: 75]
    #[arg(short = 'E', long = "conflict-exit-code", value_name = "CODE")]
    pub(crate) conflict_exit_code: Option<u8>,
    /// The id of the work that is done once
    #[arg(value_parser = parse_once_id)]
    pub(crate) id: LockName,
    /// The command and its arguments
    #[arg(last = true, required_unless_present = "forget", value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

impl From<OnceArgs> for RunArgs {
    fn from(args: OnceArgs) -> Self {
        let name = LockName::new(format!("once:{}", args.id)).expect("`parse_once_id` has checked it");
        Self {
            ttl: args.ttl,
            wait: args.wait,
            no_wait: args.no_wait,
            owner: args.owner,
            // After a loss another call may run CMD, so this one must not store a result.
            on_lost: OnLost::Kill,
            grace: args.grace,
            hold_at_least: None,
            conflict_exit_code: args.conflict_exit_code,
            gpu: None,
            gpus: None,
            name: Some(name),
            command: args.command,
            once: Some(OnceTerms { id: args.id, keep: args.keep, until_ok: args.until_ok }),
        }
    }
}

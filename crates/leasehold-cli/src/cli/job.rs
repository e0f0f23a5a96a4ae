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
/// Waits for the lock, runs CMD, releases the lock when CMD ends, and exits with CMD's exit code
/// (128+n for signal n). Sets LEASEHOLD_NAME and LEASEHOLD_FENCE for CMD.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold run nightly-report -- ./report.sh
  leasehold run --no-wait backup -- ./backup.sh || [ $? -eq 75 ]     skip if it is already running
  leasehold run --wait 5m --ttl 10s deploy -- make deploy
  leasehold run --no-wait --hold-at-least 50s cron -- ./short.sh     cron hosts whose clocks differ
  leasehold run --gpu any -- python train.py                         on the first free GPU

Exit codes: CMD's own; 75 not acquired (-E changes it), 76 lease lost, 69 store unreachable,
64 usage, 78 configuration, 126 CMD cannot be started, 127 CMD not found.")]
pub(crate) struct RunArgs {
    /// The length of the lease, renewed while CMD runs: after a crash of this machine the lock is free in D [default: 30s]
    #[arg(long, value_name = "D", value_parser = duration::parse_ttl)]
    pub(crate) ttl: Option<Ttl>,
    /// Wait at most this long for the lock (500ms, 30s, 5m, 1h) [default: no limit]
    #[arg(long, value_name = "D", value_parser = duration::parse, conflicts_with = "no_wait")]
    pub(crate) wait: Option<Duration>,
    /// Do not wait: exit with 75 if the lock is held
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// The name to show as the holder [default: CMD's name]
    #[arg(long, value_name = "S")]
    pub(crate) owner: Option<String>,
    /// What to do with CMD when the lease is lost
    #[arg(long, value_enum, value_name = "kill|warn", default_value = "kill", hide_possible_values = true)]
    pub(crate) on_lost: OnLost,
    /// Time between SIGTERM and SIGKILL after the lease is lost; SIGKILL always precedes the end of the lease
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) grace: Option<Duration>,
    /// Keep the lock for at least this long, even if CMD ends sooner
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) hold_at_least: Option<Duration>,
    /// The exit code if the lock could not be acquired [default: 75]
    #[arg(short = 'E', long = "conflict-exit-code", value_name = "CODE")]
    pub(crate) conflict_exit_code: Option<u8>,
    /// Lock GPUs instead of a name, and show CMD only those: any, any:K, or numbers such as 0 or 0,3
    #[arg(long, value_name = "any|ID", value_parser = GpuSelection::parse, conflicts_with = "name")]
    pub(crate) gpu: Option<GpuSelection>,
    /// The number of GPUs, if no driver reports it
    #[arg(long, value_name = "N")]
    pub(crate) gpus: Option<u32>,
    /// The name of the lock
    #[arg(value_parser = parse_name, required_unless_present = "gpu")]
    pub(crate) name: Option<LockName>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
    /// The options of `once`, which stores CMD's result; not an option of `run`.
    #[arg(skip)]
    pub(crate) once: Option<OnceOptions>,
}

/// The options of `once` that `run` does not have.
#[derive(Debug, Clone)]
pub(crate) struct OnceOptions {
    pub(crate) id: LockName,
    pub(crate) keep: Retention,
    pub(crate) until_ok: bool,
}

impl RunArgs {
    /// Describes the lock or the GPUs that the run waits for.
    pub(crate) fn wanted(&self) -> String {
        match (&self.gpu, &self.name) {
            (Some(gpu), _) => gpu.shown(),
            (None, Some(name)) => name.to_string(),
            (None, None) => String::new(),
        }
    }
}

/// What `run` does with its command when the lease is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    /// Kill it and all its descendants before the lock can pass to another holder.
    Kill,
    /// Report the loss and let it run: only for work that checks its fence.
    Warn,
}

/// Run a command once across all machines; the others wait and get its output and exit code
///
/// The first call runs CMD under the lock once:ID and stores its output and exit code. Concurrent calls
/// wait for that result; later calls get it at once. If CMD is killed or its machine crashes, there is no
/// result, and the next call runs CMD again. CMD writes to a pipe, not to a terminal.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold once migrate-7 -- ./migrate.sh            in the start script of every instance
  leasehold once --keep 7d report-$(date +%F) -- ./report.sh
  leasehold once --until-ok fetch -- curl -fsS https://example.org/data     do not store a failure
  leasehold once --forget migrate-7                   the next call runs it again

The first 480 KiB of stdout and of stderr are stored. A call whose output is truncated says so on stderr.

Exit codes: CMD's own, the same for every call; 75 still running (-E changes it), 76 lease lost,
69 store unreachable, 64 usage, 78 configuration, 126 CMD cannot be started, 127 CMD not found.")]
pub(crate) struct OnceArgs {
    /// How long to keep the result (30s, 5m, 1h, 7d); the next call after that runs CMD again
    #[arg(long, value_name = "D", value_parser = duration::parse_keep, default_value = "24h")]
    pub(crate) keep: Retention,
    /// Store the result only if CMD exits with 0; otherwise the next call runs CMD again
    #[arg(long)]
    pub(crate) until_ok: bool,
    /// Remove the stored result; run nothing
    #[arg(long, conflicts_with_all = ["command", "until_ok", "wait", "no_wait"])]
    pub(crate) forget: bool,
    /// The length of the lease, renewed while CMD runs: after a crash another call can run CMD in D [default: 30s]
    #[arg(long, value_name = "D", value_parser = duration::parse_ttl)]
    pub(crate) ttl: Option<Ttl>,
    /// Wait at most this long for the call that runs CMD [default: no limit]
    #[arg(long, value_name = "D", value_parser = duration::parse, conflicts_with = "no_wait")]
    pub(crate) wait: Option<Duration>,
    /// Do not wait: exit with 75 while another call runs CMD
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// The name to show as the holder [default: CMD's name]
    #[arg(long, value_name = "S")]
    pub(crate) owner: Option<String>,
    /// Time between SIGTERM and SIGKILL after the lease is lost; SIGKILL always precedes the end of the lease
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) grace: Option<Duration>,
    /// The exit code if another call is still running CMD [default: 75]
    #[arg(short = 'E', long = "conflict-exit-code", value_name = "CODE")]
    pub(crate) conflict_exit_code: Option<u8>,
    /// The id of the work
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
            once: Some(OnceOptions { id: args.id, keep: args.keep, until_ok: args.until_ok }),
        }
    }
}

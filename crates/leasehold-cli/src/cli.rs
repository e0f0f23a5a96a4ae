//! Every command and option, and what a refused command line looks like: one line and exit 64.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use leasehold::LockName;
use leasehold::bindings::Retention;
use leasehold::inspect::HolderId;
use leasehold::lease::Ttl;

use crate::demo::Trade;
use crate::duration;
use crate::exit::{Exit, Failure};
use crate::gpu::Wanted;
use crate::{refusal, say};

/// Locks that people can hold, see and trust.
///
/// On one machine no server is needed: all processes share a SQLite file. On many machines, name a
/// Redis or Valkey server with --store or LEASEHOLD_STORE.
#[derive(Debug, Parser)]
#[command(name = "leasehold", bin_name = "leasehold", version, max_term_width = 100, after_help = EXAMPLES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  leasehold run nightly-report -- ./report.sh       one copy at a time; others wait
  leasehold run --no-wait backup -- ./backup.sh     ... or end with 75 at once
  leasehold once migrate-7 -- ./migrate.sh          one of many runs it, all get its output
  leasehold why nightly-report                      who holds it, who waits
  leasehold ls                                      every lock that is held
  leasehold doctor                                  can this store keep a promise?
  leasehold serve                                   the same over HTTP, and a page to look at
  leasehold demo                                    watch it work

Exit codes: 64 usage, 69 store unreachable, 75 held by somebody else, 76 lease lost or not held by
the one named, 78 configuration; run passes on its command's own.";

/// Options of every command.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// sqlite:PATH, redis://HOST:PORT (rediss:// for TLS) or memory: [default: $LEASEHOLD_STORE, else `store` of the configuration file, else a SQLite file]
    #[arg(long, global = true, value_name = "URL", display_order = 900)]
    pub(crate) store: Option<String>,
    /// Sets locks of one application apart from another's [default: $LEASEHOLD_NAMESPACE, else `namespace` of the configuration file, else leasehold]
    #[arg(long, global = true, value_name = "NS", display_order = 901)]
    pub(crate) namespace: Option<String>,
    /// The configuration file [default: $LEASEHOLD_CONFIG, else none]
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath, display_order = 902)]
    pub(crate) config: Option<PathBuf>,
    /// Answer in JSON, for programs
    #[arg(long, global = true, display_order = 903)]
    pub(crate) json: bool,
}

/// The command line of a keeper: the commands that run another one. To define all the others takes longer than to read
/// these.
#[derive(Debug, Parser)]
#[command(name = "leasehold", bin_name = "leasehold", version, max_term_width = 100, disable_help_subcommand = true)]
pub(crate) struct JobCli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: JobCommand,
}

/// As in [`Command`].
#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    Run(RunArgs),
    Once(OnceArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Once(OnceArgs),
    Claim(ClaimArgs),
    Acquire(AcquireArgs),
    Renew(RenewArgs),
    Release(ReleaseArgs),
    Evict(EvictArgs),
    Ls(LsArgs),
    Why(WhyArgs),
    Gpus(GpusArgs),
    Journal(JournalArgs),
    Serve(ServeArgs),
    Demo(DemoArgs),
    #[command(hide = true)]
    DemoWorker(DemoWorkerArgs),
    Keys(KeysArgs),
    Config(ConfigArgs),
    /// Can this store keep a promise? One line per check: ok, warn or bad, and what to do
    ///
    /// Ends with 0 when nothing is bad, else with 1.
    Doctor(DoctorArgs),
    /// Print the completions of a shell
    ///
    /// For bash: leasehold completions bash > ~/.local/share/bash-completion/completions/leasehold
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write one per command into a directory
    Man {
        /// Write leasehold.1, leasehold-run.1, … there
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        out: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// First pair a SQLite database with the .alive directory beside it, after the database was copied, moved or
    /// restored. Ends with 75 while a lease in it may have a living holder
    #[arg(long)]
    pub(crate) adopt: bool,
}

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
    /// Wait at most so long for the lock (500ms, 30s, 5m, 1h); without it, for as long as it takes
    #[arg(long, value_name = "D", value_parser = duration::parse, conflicts_with = "no_wait")]
    pub(crate) wait: Option<Duration>,
    /// Do not wait: end with 75 when somebody else holds the lock
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// What people read who ask for the holder [default: CMD's name]
    #[arg(long, value_name = "S")]
    pub(crate) owner: Option<String>,
    /// What happens to CMD when the lease is lost
    #[arg(long, value_enum, value_name = "kill|warn", default_value = "kill", hide_possible_values = true)]
    pub(crate) on_lost: OnLost,
    /// Time between SIGTERM and SIGKILL for a CMD whose lease is lost; it never reaches beyond the lease
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) grace: Option<Duration>,
    /// Keep the lock at least so long, even when CMD ends sooner
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) hold_at_least: Option<Duration>,
    /// The exit code for "somebody else holds it" [default: 75]
    #[arg(short = 'E', long = "conflict-exit-code", value_name = "CODE")]
    pub(crate) conflict_exit_code: Option<u8>,
    /// Run on a GPU instead, and let CMD see only that: any, any:K, or numbers such as 0 or 0,3
    #[arg(long, value_name = "any|ID", value_parser = Wanted::parse, conflicts_with = "name")]
    pub(crate) gpu: Option<Wanted>,
    /// How many GPUs there are, where no driver says so
    #[arg(long, value_name = "N")]
    pub(crate) gpus: Option<u32>,
    /// The lock
    #[arg(value_parser = parse_name, required_unless_present = "gpu")]
    pub(crate) name: Option<LockName>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
    /// Not an option of `run`: its result is stored, and CMD runs only if there is none.
    #[arg(skip)]
    pub(crate) once: Option<OnceWish>,
}

/// What `once` asks for beyond `run`.
#[derive(Debug, Clone)]
pub(crate) struct OnceWish {
    pub(crate) id: LockName,
    pub(crate) keep: Retention,
    pub(crate) until_ok: bool,
}

/// Run a command once across all machines; the others wait and get its output and exit code
///
/// The first one runs CMD under the lock once:ID and stores what it wrote and how it ended; whoever comes
/// meanwhile waits for that, whoever comes later gets it at once. A CMD that was killed, or whose machine
/// died, has no result: the next one runs it. CMD's output goes through a pipe, not to a terminal.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold once migrate-7 -- ./migrate.sh            on every machine that is deployed to
  leasehold once --keep 7d report-$(date +%F) -- ./report.sh
  leasehold once --until-ok fetch -- curl -fsS https://example.org/data     a failure is not stored
  leasehold once --forget migrate-7                   the next one runs it again

Of each stream the first 480 KiB are stored; whoever gets less than was written is told so on stderr.

Exit codes: CMD's own, the same for everybody; 75 still under way (-E changes it), 76 lease lost,
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
    /// Wait at most so long for the one who runs it; without it, for as long as it takes
    #[arg(long, value_name = "D", value_parser = duration::parse, conflicts_with = "no_wait")]
    pub(crate) wait: Option<Duration>,
    /// Do not wait: end with 75 while somebody else runs it
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// What people read who ask who runs it [default: CMD's name]
    #[arg(long, value_name = "S")]
    pub(crate) owner: Option<String>,
    /// Time between SIGTERM and SIGKILL for a CMD whose lease is lost; it never reaches beyond the lease
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) grace: Option<Duration>,
    /// The exit code for "somebody else runs it" [default: 75]
    #[arg(short = 'E', long = "conflict-exit-code", value_name = "CODE")]
    pub(crate) conflict_exit_code: Option<u8>,
    /// What is done once
    #[arg(value_parser = parse_once_id)]
    pub(crate) id: LockName,
    /// The command and its arguments
    #[arg(last = true, required_unless_present = "forget", value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

impl From<OnceArgs> for RunArgs {
    fn from(args: OnceArgs) -> Self {
        let name = LockName::new(format!("once:{}", args.id)).expect("checked when it was read");
        Self {
            ttl: args.ttl,
            wait: args.wait,
            no_wait: args.no_wait,
            owner: args.owner,
            // A result is nobody's whose lease was lost.
            on_lost: OnLost::Kill,
            grace: args.grace,
            hold_at_least: None,
            conflict_exit_code: args.conflict_exit_code,
            gpu: None,
            gpus: None,
            name: Some(name),
            command: args.command,
            once: Some(OnceWish { id: args.id, keep: args.keep, until_ok: args.until_ok }),
        }
    }
}

/// Bind a value to an id unless one is bound already, and print the one that counts
///
/// One atomic step; nobody waits. Whoever comes first creates, everybody else gets the same value, until
/// the lease is over. Ends with 0 either way.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  job=$(leasehold claim request-7 \"job-$$\" --lease 10m)     everybody has the same job
  leasehold claim request-7 \"$HOSTNAME\" --lease 1m --json | jq -e .created && ./create.sh")]
pub(crate) struct ClaimArgs {
    /// The request
    #[arg(value_parser = parse_request_id)]
    pub(crate) id: LockName,
    /// What is bound to it, if nothing is: at most 1 MiB
    #[arg(allow_hyphen_values = true)]
    pub(crate) value: String,
    /// How long it stays bound (1s, 10m, 24h, 7d)
    #[arg(long, value_name = "D", value_parser = duration::parse_keep)]
    pub(crate) lease: Retention,
}

impl RunArgs {
    /// What it waits for, as people read it.
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
    /// End it and all its children, before the lock can be somebody else's.
    Kill,
    /// Say so and let it run: only for work that checks its fence.
    Warn,
}

/// Take a lock for a script, and print its token and fence
///
/// Such a lease belongs to no process: nothing but its ttl ends it, unless the script renews or releases
/// it with the token. Where a single command can be wrapped, `leasehold run` is the safer way.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  taken=$(leasehold acquire deploy --ttl 10m) || exit      75: somebody else holds it
  export LEASEHOLD_TOKEN=\"${taken%%[!A-Za-z0-9_-]*}\"       its first line
  leasehold renew deploy || exit                           76: lost, so stop
  leasehold release deploy

Prints the token on the first line and the fence on the second. Keep the token secret: it alone can
renew and release the lock.")]
pub(crate) struct AcquireArgs {
    /// The lock
    #[arg(value_parser = parse_name)]
    pub(crate) name: LockName,
    /// How long the lease lasts when nobody renews it (500ms, 30s, 5m, 1h; at most 24h)
    #[arg(long, value_name = "D", value_parser = duration::parse_ttl)]
    pub(crate) ttl: Ttl,
    /// Stand in line for at most so long; without it, end with 75 when somebody else holds it
    #[arg(long, value_name = "D", value_parser = duration::parse)]
    pub(crate) wait: Option<Duration>,
    /// What people read who ask for the holder [default: the parent process's name]
    #[arg(long, value_name = "S")]
    pub(crate) owner: Option<String>,
}

/// Where a token comes from: a process list is read by everybody.
#[derive(Debug, Args)]
pub(crate) struct TokenArgs {
    /// The token that `acquire` printed; visible to everybody who can list processes
    #[arg(long, value_name = "T", conflicts_with = "token_file")]
    pub(crate) token: Option<String>,
    /// Read the token from the first line of a file (- is stdin) [default: $LEASEHOLD_TOKEN]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,
}

/// Prolong a lease that `acquire` took
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
    /// How long it lasts from now; never shortens [default: what the lease was taken with]
    #[arg(long, value_name = "D", value_parser = duration::parse_ttl)]
    pub(crate) ttl: Option<Ttl>,
}

/// Give back a lock that `acquire` took
///
/// Ends with 76 when the lock is not, or no longer, held by that token; nothing is touched then.
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

/// Take a lock away from its holder
///
/// Revokes by default: the holder is told to stop, its renewals are refused, and the lock passes on when
/// it releases or its lease ends. Never makes two holders. --force frees the lock at once: a holder that
/// is still at work does not know, and only fences protect what it writes.
///
/// Only the holder that was looked at is meant: when the lock changes hands meanwhile, nothing is done
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
    /// Why, for those who read the events
    #[arg(long, value_name = "S", default_value = "by hand", hide_default_value = true)]
    pub(crate) reason: String,
    /// Do not ask
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
    /// Look again every second until interrupted
    #[arg(long, short)]
    pub(crate) watch: bool,
}

/// Say who holds a lock, since when, whether it lives, and who waits
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
/// Devices are known by the NVIDIA driver, else by CUDA_VISIBLE_DEVICES, else by --gpus. Without any of
/// them, the GPU locks that are held in the store.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold gpus
  leasehold gpus --json | jq '.gpus[] | select(.lock.held | not) | .id'")]
pub(crate) struct GpusArgs {
    /// How many GPUs there are, where no driver says so
    #[arg(long, value_name = "N")]
    pub(crate) gpus: Option<u32>,
}

/// What could not be done and was written down on this machine
///
/// A release that failed by every means is kept in a journal, and done when the store is back.
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
    /// Every entry that is not settled, oldest first
    List,
    /// One entry in full (never its token)
    Show {
        /// The entry
        id: String,
    },
    /// Do now what the journal says is still to be done in the store
    Replay,
    /// Take an entry out without doing anything
    Settle {
        /// The entry
        id: String,
        /// Do not ask
        #[arg(long, short)]
        yes: bool,
    },
}

/// Serve the locks over HTTP: for people who look, and for programs in any language
///
/// Ends with SIGTERM or Ctrl-C, after it has answered what was asked before.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold serve
  curl http://127.0.0.1:8847/api/v1/locks
  leasehold --store redis://cache-1:6379 serve --listen 127.0.0.1:9000
  leasehold serve --config /etc/leasehold.yaml

Exit codes: 69 the address is taken or the store unreachable, 78 the configuration is wrong or it may not
listen there.")]
pub(crate) struct ServeArgs {
    /// Where to listen [default: server.listen of the configuration, else 127.0.0.1:8847]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
    /// A name this server is known by, besides localhost and plain addresses; may be given several times
    #[arg(long = "allow-host", value_name = "NAME")]
    pub(crate) hosts: Vec<String>,
    /// The keys that are needed to come in [default: server.keys of the configuration, else keys.json beside the default store, if it exists]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) keys: Option<PathBuf>,
    /// Where it is written down who took which lock away [default: server.audit of the configuration, else audit.jsonl beside the default store]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) audit: Option<PathBuf>,
    /// Serve HTTPS with this certificate, in PEM, followed by those it is signed by; it may be replaced at any time
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The certificate's private key, in PEM
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
}

/// Watch it work: a server, a dozen workers, a crash, a hang and an eviction
///
/// Starts `serve` on a store of its own with workers that share GPUs, orders and a report, lets one crash, one hang
/// and one be evicted, and says what to look at. Leaves nothing behind.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold demo
  leasehold demo --for 30s --listen 127.0.0.1:9000")]
pub(crate) struct DemoArgs {
    /// How long it goes on
    #[arg(long = "for", value_name = "D", default_value = "5m", value_parser = duration::parse)]
    pub(crate) lasts: Duration,
    /// Where the page is [default: 127.0.0.1:8847, or any port that is free]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
}

/// One worker of the demo.
#[derive(Debug, Args)]
pub(crate) struct DemoWorkerArgs {
    /// What people read who ask for the holder
    pub(crate) name: String,
    /// What it does
    pub(crate) trade: Trade,
    /// The process id of the demo
    pub(crate) of: u32,
}

/// Make, list and revoke the keys of `serve`
///
/// A viewer's key may look, an operator's also take locks and take them away. The file keeps only hashes; a
/// server that runs knows of a change within a second.
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
    /// Make a key, and print it: this is the only time it is shown
    Create {
        /// Whose it is, for people
        name: String,
        /// What it allows
        #[arg(long, value_enum, value_name = "viewer|operator", default_value = "viewer", hide_possible_values = true)]
        role: KeyRole,
    },
    /// Every key, without the keys themselves
    List,
    /// Take a key back
    Revoke {
        /// The id that `list` shows
        id: String,
    },
}

/// Check a configuration file, and see what is in force
///
/// Every key can also be said by a variable: LEASEHOLD_ and the key in capitals, sections joined by _.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold config check /etc/leasehold.yaml
  leasehold config show
  LEASEHOLD_GPU_LOCK_MAX_WAIT_TIME=1800 leasehold config show /etc/leasehold.yaml

Exit codes: 78 something is wrong with it; every mistake is told, a line each.")]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Is anything wrong with a file? Each mistake in a line: file:line:column, and what would be right
    Check {
        /// The file
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Every value in force, and where it came from: default, file:line:column or a variable
    Show {
        /// The file [default: --config, else $LEASEHOLD_CONFIG, else none]
        #[arg(value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
    },
}

/// What a key allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KeyRole {
    /// Looking.
    Viewer,
    /// Looking, taking locks, and taking them away.
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

fn parse_name(text: &str) -> Result<LockName, String> {
    LockName::new(text).map_err(|error| error.to_string())
}

fn parse_request_id(text: &str) -> Result<LockName, String> {
    LockName::new(text).map_err(|error| error.to_string().replacen("lock name", "id", 1))
}

/// Its lock is called `once:ID`.
fn parse_once_id(text: &str) -> Result<LockName, String> {
    let id = parse_request_id(text)?;
    match LockName::new(format!("once:{id}")) {
        Ok(_) => Ok(id),
        Err(_) => Err("the id is longer than 507 bytes".into()),
    }
}

fn parse_holder_id(text: &str) -> Result<HolderId, String> {
    HolderId::parse(text).map_err(|error| error.to_string())
}

/// The command line, or the one line that says what is wrong with it. Help and version are printed
/// here, and are no failure.
pub(crate) fn parse<C: Parser>() -> Result<Option<C>, Failure> {
    match C::try_parse() {
        Ok(cli) => Ok(Some(cli)),
        Err(error) if !error.use_stderr() => {
            say::data(&error.render().to_string())?;
            Ok(None)
        }
        Err(error) => Err(Failure::new(Exit::Usage, refusal::in_one_line(&error))),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definitions_make_sense() {
        Cli::command().debug_assert();
        JobCli::command().debug_assert();
    }
}

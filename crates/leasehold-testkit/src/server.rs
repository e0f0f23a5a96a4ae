//! A real Redis or Valkey server for one test.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::Value;
/// A reply of a server.
pub use redis::Value as RedisValue;
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::random::random_u64;
use crate::resp;
use crate::signal::send_signal;

/// The variable with the path of the server binary, to run the tests with Valkey or another version of Redis.
pub const SERVER_BINARY_VAR: &str = "LEASEHOLD_TEST_SERVER";

/// The threshold of [`RedisServer::slowest_script_us`]: faster scripts are not recorded.
pub const SLOW_SCRIPT_US: u64 = 100;

const READY_TIMEOUT: Duration = Duration::from_secs(10);
const READY_POLL: Duration = Duration::from_millis(2);
/// Longer than any `DEBUG SLEEP` of a test. A server that takes longer hangs.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
const PORT_ATTEMPTS: usize = 20;
/// Below the ephemeral ports of Linux: there, a client that tries to reconnect to a killed server would at some point get the
/// server's port as its own and connect to itself.
const PORTS: Range<u16> = 10_000..32_000;
const LOG_TAIL_LINES: usize = 40;
/// Enough for every slow script of a long run.
const SLOWLOG_ENTRIES: &str = "10000";

/// A Redis or Valkey process on a free loopback port, with a temporary directory. Killed on drop.
#[derive(Debug)]
pub struct RedisServer {
    process: Mutex<Option<Child>>,
    port: u16,
    extra_args: Vec<String>,
    dir: TempDir,
}

impl RedisServer {
    /// Starts a server without persistence and waits until it is ready.
    pub async fn start() -> Self {
        Self::with(&[]).await
    }

    /// Starts a server with additional arguments, which override the defaults.
    pub async fn with(extra_args: &[&str]) -> Self {
        for _ in 0..PORT_ATTEMPTS {
            let server = Self {
                process: Mutex::new(None),
                port: free_port(),
                extra_args: extra_args.iter().map(ToString::to_string).collect(),
                dir: tempfile::tempdir().expect("a temporary directory for the server"),
            };
            server.relaunch();
            match server.wait_until_ready().await {
                Ok(()) => return server,
                Err(NotReady::PortTaken) => {}
                Err(NotReady::Other(why)) => panic!("{}", server.with_log(&why)),
            }
        }
        panic!("no free port for the server after {PORT_ATTEMPTS} attempts");
    }

    /// Starts a replica of another server and waits until it has all data.
    pub async fn replica_of(primary: &Self) -> Self {
        // By default Redis waits five seconds for further replicas.
        primary.command(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]).await;
        let replica = Self::with(&["--repl-diskless-sync-delay", "0"]).await;
        replica.follow(primary).await;
        replica
    }

    /// Makes this server a replica of another one and waits until it has all data.
    pub async fn follow(&self, primary: &Self) {
        self.command(&["REPLICAOF", "127.0.0.1", &primary.port.to_string()]).await;
        self.follows(primary).await;
    }

    /// Waits until this replica has all data and its primary lists it as online.
    async fn follows(&self, primary: &Self) {
        let online = format!("port={},state=online", self.port);
        self.wait_for_replication(|info| info.contains("master_link_status:up")).await;
        primary.wait_for_replication(|info| info.contains(&online)).await;
    }

    /// Makes this server the primary and its primary a replica, with `REPLICAOF` on both. No data is lost unless a client writes
    /// meanwhile; connections stay open.
    pub async fn take_over_from(&self, primary: &Self) {
        let offset = |info: &str, field: &str| {
            info.lines().find_map(|line| line.strip_prefix(field).map(str::trim).map(str::to_owned))
        };
        loop {
            let primary_info = text_of(&primary.command(&["INFO", "replication"]).await);
            let info = text_of(&self.command(&["INFO", "replication"]).await);
            if offset(&primary_info, "master_repl_offset:") == offset(&info, "slave_repl_offset:") {
                break;
            }
            tokio::time::sleep(READY_POLL).await;
        }
        self.command(&["REPLICAOF", "NO", "ONE"]).await;
        primary.follow(self).await;
    }

    /// Makes this server the primary with `FAILOVER` on its primary. No data is lost; connections stay open.
    pub async fn fail_over_from(&self, primary: &Self) {
        let port = self.port.to_string();
        let answer = primary.command(&["FAILOVER", "TO", "127.0.0.1", &port]).await;
        assert_eq!(answer, Value::Okay, "{}", primary.with_log("FAILOVER"));
        self.wait_for_replication(|info| info.contains("role:master")).await;
        primary.follows(self).await;
    }

    async fn wait_for_replication(&self, reached: impl Fn(&str) -> bool) {
        let give_up_at = Instant::now() + READY_TIMEOUT;
        loop {
            let info = text_of(&self.command(&["INFO", "replication"]).await);
            if reached(&info) {
                return;
            }
            assert!(Instant::now() < give_up_at, "{}", self.with_log(&format!("not in time: {info}")));
            tokio::time::sleep(READY_POLL).await;
        }
    }

    /// Returns `redis://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the port, which a restart does not change.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the directory of its files, which is removed on drop.
    pub fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// Returns the process id of the running server.
    ///
    /// # Panics
    /// If the server was killed and not started again.
    pub fn pid(&self) -> u32 {
        self.process().as_ref().expect("the server is not running").id()
    }

    /// Kills the process with SIGKILL and waits until it has ended.
    pub fn kill9(&self) {
        if let Some(mut child) = self.process().take() {
            // Neither fails for a child that was not waited for.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Stops the server with SIGTERM and waits until it has ended.
    pub async fn stop(&self) {
        send_signal(self.pid(), Signal::TERM);
        let runs = || self.process().as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)));
        while runs() {
            tokio::time::sleep(READY_POLL).await;
        }
        self.kill9();
    }

    /// Kills the server if it runs, starts it on the same port in the same directory, and waits until it is ready.
    pub async fn restart(&self) {
        self.kill9();
        self.relaunch();
        self.ready().await;
    }

    /// Starts a killed server again without waiting, for tests that watch it load its data.
    ///
    /// # Panics
    /// If the server still runs, or the binary cannot be started.
    pub fn relaunch(&self) {
        let mut process = self.process();
        assert!(process.is_none(), "the server still runs");
        // A new log per start, so that its lines are about this process.
        let log = File::create(self.log_path()).expect("a log file in the server's directory");
        let binary = server_binary();
        let child = Command::new(&binary)
            .args(["--bind", "127.0.0.1", "--port", &self.port.to_string()])
            .args(["--daemonize", "no", "--save", "", "--appendonly", "no"])
            .args(["--enable-debug-command", "local"])
            .args(["--slowlog-log-slower-than", &SLOW_SCRIPT_US.to_string()])
            .args(["--slowlog-max-len", SLOWLOG_ENTRIES])
            .arg("--dir")
            .arg(self.dir.path())
            .args(&self.extra_args)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle on the log"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| {
                panic!(
                    "cannot start the test server `{}`: {error}; install redis-server or point {SERVER_BINARY_VAR} at one",
                    binary.display()
                )
            });
        *process = Some(child);
    }

    /// Waits until the server has loaded its data and answers.
    ///
    /// # Panics
    /// With the end of the server's log if that takes more than ten seconds.
    pub async fn ready(&self) {
        match self.wait_until_ready().await {
            Ok(()) => {}
            Err(NotReady::PortTaken) => panic!("{}", self.with_log("its port was taken meanwhile")),
            Err(NotReady::Other(why)) => panic!("{}", self.with_log(&why)),
        }
    }

    /// Stops the process with SIGSTOP: connections stay open, but there are no replies.
    pub fn pause(&self) {
        send_signal(self.pid(), Signal::STOP);
    }

    /// Resumes a paused process.
    pub fn resume(&self) {
        send_signal(self.pid(), Signal::CONT);
    }

    /// Returns the last lines of the server's log.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n")
    }

    /// Sends one command on a new connection. An error reply is `Value::ServerError`.
    ///
    /// Nothing else is sent, so it adds exactly one to the command counts.
    ///
    /// # Panics
    /// If the server cannot be reached, or does not reply for a minute.
    pub async fn command(&self, parts: &[&str]) -> Value {
        let answer = tokio::time::timeout(REPLY_TIMEOUT, self.exchange(parts)).await;
        match answer {
            Ok(Ok(value)) => value,
            Ok(Err(error)) => panic!("{}", self.with_log(&format!("{parts:?}: {error}"))),
            Err(_) => panic!("{}", self.with_log(&format!("{parts:?}: no answer in {REPLY_TIMEOUT:?}"))),
        }
    }

    /// Returns the number of calls per command (`"evalsha"`, `"client|setinfo"`), including those of scripts, since the start or
    /// the last `CONFIG RESETSTAT`.
    pub async fn commandstats(&self) -> BTreeMap<String, u64> {
        let info = self.command(&["INFO", "commandstats"]).await;
        parse_commandstats(&text_of(&info))
    }

    /// Returns the run time of the slowest script in microseconds, since the start or the last `SLOWLOG RESET`; 0 if all were
    /// faster than [`SLOW_SCRIPT_US`].
    pub async fn slowest_script_us(&self) -> u64 {
        let log = self.command(&["SLOWLOG", "GET", "-1"]).await;
        let Value::Array(entries) = &log else {
            panic!("SLOWLOG answered {log:?}");
        };
        entries.iter().filter_map(script_us).max().unwrap_or(0)
    }

    async fn wait_until_ready(&self) -> Result<(), NotReady> {
        let give_up_at = Instant::now() + READY_TIMEOUT;
        loop {
            let exited = self.process().as_mut().and_then(|child| child.try_wait().ok().flatten());
            let log = self.log();
            if let Some(status) = exited {
                self.kill9();
                let taken = log.contains("Address already in use");
                return Err(if taken {
                    NotReady::PortTaken
                } else {
                    NotReady::Other(format!("the server ended at once, {status}"))
                });
            }
            // Logged after binding and loading, so the process that answers on the port is this one.
            if log.contains("Ready to accept connections") && self.exchange(&["PING"]).await.is_ok() {
                return Ok(());
            }
            if Instant::now() > give_up_at {
                return Err(NotReady::Other(format!("no answer to PING in {READY_TIMEOUT:?}")));
            }
            tokio::time::sleep(READY_POLL).await;
        }
    }

    async fn exchange(&self, parts: &[&str]) -> io::Result<Value> {
        let mut command = redis::Cmd::new();
        for part in parts {
            command.arg(part);
        }
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).await?;
        stream.write_all(&command.get_packed_command()).await?;
        let mut reply = Vec::new();
        loop {
            if stream.read_buf(&mut reply).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Some(len) = resp::frame_len(&reply)? {
                return redis::parse_redis_value(&reply[..len]).map_err(io::Error::other);
            }
        }
    }

    fn process(&self) -> MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("server.log")
    }

    fn log(&self) -> String {
        let bytes = fs::read(self.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn with_log(&self, what: &str) -> String {
        format!("{what}\nthe server's log ends:\n{}", self.log_tail())
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // SIGKILL also ends a stopped process. SIGCONT is not sent, because the process would run again for a moment.
        self.kill9();
    }
}

enum NotReady {
    PortTaken,
    Other(String),
}

fn server_binary() -> PathBuf {
    std::env::var_os(SERVER_BINARY_VAR).map_or_else(|| "redis-server".into(), PathBuf::from)
}

/// Returns a port on which no process listens at the moment. It may be taken before the caller uses it.
pub fn free_port() -> u16 {
    loop {
        let width = u64::from(PORTS.end - PORTS.start);
        let offset = u16::try_from(random_u64() % width).expect("less than the width");
        let port = PORTS.start + offset;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

/// Parses lines such as `cmdstat_get:calls=3,usec=12,…`.
fn parse_commandstats(info: &str) -> BTreeMap<String, u64> {
    let entry = |line: &str| {
        let (command, fields) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        let calls = fields.split(',').find_map(|field| field.strip_prefix("calls="))?;
        Some((command.to_string(), calls.parse().ok()?))
    };
    info.lines().filter_map(entry).collect()
}

/// Returns the duration of a slow log entry `[id, time, µs, [command…], …]` if it is a script.
fn script_us(entry: &Value) -> Option<u64> {
    let Value::Array(fields) = entry else {
        return None;
    };
    let (Value::Int(us), Value::Array(command)) = (fields.get(2)?, fields.get(3)?) else {
        return None;
    };
    let name = text_of(command.first()?).to_ascii_uppercase();
    let is_script = ["EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO", "FCALL", "FCALL_RO"].contains(&name.as_str());
    is_script.then(|| u64::try_from(*us).ok()).flatten()
}

fn text_of(value: &Value) -> String {
    redis::from_redis_value_ref(value).unwrap_or_else(|error| panic!("expected a text, got {value:?}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commandstats_are_parsed() {
        let info =
            "# Commandstats\r\ncmdstat_get:calls=3,usec=12,rejected_calls=0\r\ncmdstat_client|id:calls=1,usec=2\r\n";
        let stats = parse_commandstats(info);
        assert_eq!(stats, BTreeMap::from([("get".into(), 3), ("client|id".into(), 1)]));
    }
}

//! One session: a connection that is logged in, identified and subscribed, with the fence counter raised and the
//! scripts loaded.

use std::sync::Arc;

use super::super::inbox::Inbox;
use super::super::keys;
use super::super::options::RedisOptions;
use super::super::scripts::{self, Script};
use super::address::Address;
use super::connection::{Connection, PushHandler};
use super::reply::{from_server, items, number, text, unexpected_reply, word};
use super::resp::{Cmd, Pipeline, ServerError, Value, cmd};
use crate::clock::{self, Moment};
use crate::store::{StoreError, StoreErrorKind};

/// The oldest major version with the commands that the store needs: `PEXPIRE … GT`, SPUBLISH.
const OLDEST_MAJOR: u64 = 7;

/// A connection on which the handshake is complete.
pub(crate) struct Session {
    connection: Connection,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) identity: Option<Identity>,
    /// The moment of the handshake, and the server's wall clock at that moment in milliseconds.
    opened: (Moment, u64),
    /// Whether a broken connection of ours can be killed for certain, so that no command it sent runs later.
    pub(crate) can_kill: bool,
    /// Whether the server accepted the subscription. Without it, waiters poll.
    pub(crate) subscribed: bool,
}

/// The server's id and address of a connection. After a restart, the id alone could belong to another connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    id: String,
    addr: String,
}

/// A reply and the moment before its request was sent.
pub(crate) struct SessionReply<T> {
    pub(crate) asked_at: Moment,
    pub(crate) reply: T,
}

impl Session {
    /// Connects, logs in, and completes the handshake in one more round trip. `highest_fence` is the highest fence that
    /// this process has seen, `previous` its last connection.
    pub(crate) async fn open(
        address: &Address,
        options: &RedisOptions,
        inbox: Inbox,
        channel: &str,
        highest_fence: u64,
        previous: Option<&Identity>,
    ) -> Result<Self, StoreError> {
        let inbox = Arc::new(inbox);
        let connection = open_connection(address, options, inbox.clone()).await?;
        let (before, before_ms) = (Moment::now(), clock::wall_ms());
        // Kills our previous connection before anything else: commands that it sent could still run otherwise.
        let who = connection.send_all(&identify(previous));
        let subscribing = connection.send_subscription(cmd("SSUBSCRIBE").arg(channel), "ssubscribe", channel);
        let mut load = Pipeline::default();
        // Errors are ignored: a script that could not be loaded is sent whole when it is needed.
        scripts::all().for_each(|script| load.add(script.load()));
        let mut raise = scripts::RAISE.eval();
        raise.arg(1_usize).arg(keys::FENCE).arg(highest_fence).arg(channel);
        let (loading, raising) = (connection.send_all(&load), connection.send(&raise));

        let who = who.all().await?;
        let subscribed = match subscribing.reply().await? {
            Value::Push(_) => true,
            Value::Error(error) => permitted(&error)?,
            _ => false,
        };
        loading.all().await?;
        let ahead_ms = clock_ahead_ms(raising.reply().await?, before_ms)?;

        // A user may lack permission for any of these. A connection without a known identity cannot be killed.
        let identity = who.get(1).and_then(text).as_deref().and_then(Identity::parse);
        let can_kill = match who.get(2) {
            Some(Value::Error(error)) => permitted(error)?,
            _ => identity.is_some(),
        };
        let opened = (before, before_ms.saturating_add_signed(ahead_ms));
        Ok(Self { connection, inbox, identity, opened, can_kill, subscribed })
    }

    /// Estimates the server's wall clock in milliseconds: its time at the handshake, advanced by the boot clock, which
    /// cannot be set.
    pub(crate) fn server_ms(&self) -> u64 {
        let (opened, server_ms) = self.opened;
        server_ms.saturating_add(u64::try_from(opened.until(Moment::now()).as_millis()).unwrap_or(0))
    }

    /// How far this process's wall clock is ahead of the server's, in milliseconds; 0 below a second, which network
    /// latency explains.
    pub(crate) fn wall_ahead_ms(&self) -> i64 {
        let ahead = i64::try_from(clock::wall_ms()).unwrap_or(0) - i64::try_from(self.server_ms()).unwrap_or(0);
        if ahead.abs() < 1_000 { 0 } else { ahead }
    }

    /// Closes the connection; unanswered requests fail.
    pub(crate) fn abort(&self) {
        self.connection.abort();
    }

    /// Closes the connection to a server that became a replica, so that the client reconnects to the primary.
    pub(crate) fn abandon_replica(&self) {
        tracing::warn!("the server became a replica; reconnecting to find the primary");
        self.abort();
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.connection.is_broken()
    }

    /// Waits until the connection is closed.
    pub(crate) async fn broken(&self) {
        self.connection.broken().await;
    }

    /// Sends one command. An error reply becomes an `Err`.
    pub(crate) async fn send(&self, cmd: &Cmd) -> Result<SessionReply<Value>, StoreError> {
        let answer = self.send_raw(cmd).await?;
        match &answer.reply {
            Value::Error(error) => Err(from_server(error)),
            _ => Ok(answer),
        }
    }

    /// Sends one command. An error reply is returned as a value.
    pub(crate) async fn send_raw(&self, cmd: &Cmd) -> Result<SessionReply<Value>, StoreError> {
        let asked = self.connection.send(cmd);
        let asked_at = asked.asked_at;
        Ok(SessionReply { asked_at, reply: asked.reply().await? })
    }

    /// Sends several commands in one write, not as a transaction. Error replies are returned as values.
    pub(crate) async fn send_all(&self, pipe: &Pipeline) -> Result<SessionReply<Vec<Value>>, StoreError> {
        let asked = self.connection.send_all(pipe);
        let asked_at = asked.asked_at;
        Ok(SessionReply { asked_at, reply: asked.all().await? })
    }

    /// Unsubscribes from the inbox channel, as the last request of this session.
    pub(crate) async fn unsubscribe(&self, channel: &str) {
        // The session ends, whatever the reply is.
        let _ =
            self.connection.send_subscription(cmd("SUNSUBSCRIBE").arg(channel), "sunsubscribe", channel).reply().await;
    }

    /// Runs a script by its hash, or sends it whole if the server does not have it.
    pub(crate) async fn run(
        &self,
        script: &Script,
        keys: &[&str],
        args: impl Fn(&mut Cmd),
    ) -> Result<SessionReply<Value>, StoreError> {
        let mut cmd = script.evalsha();
        cmd.arg(keys.len()).arg(keys);
        args(&mut cmd);
        let answer = self.send_raw(&cmd).await?;
        match &answer.reply {
            Value::Error(error) if error.is_no_script() => {
                let mut cmd = script.eval();
                cmd.arg(keys.len()).arg(keys);
                args(&mut cmd);
                Box::pin(self.send(&cmd)).await
            }
            Value::Error(error) => Err(from_server(error)),
            _ => Ok(answer),
        }
    }
}

/// Opens a connection and logs in.
pub(crate) async fn open_connection(
    address: &Address,
    options: &RedisOptions,
    handler: Arc<dyn PushHandler>,
) -> Result<Connection, StoreError> {
    let connection = Connection::open(address, options, handler).await?;
    let mut hello = cmd("HELLO");
    hello.arg("3");
    if let Some((user, password)) = &address.login {
        hello.arg(["AUTH", user, password]);
    }
    // Before any other command, so that none runs in another database or as another user.
    check_login(&connection.send(&hello).reply().await?)?;
    if address.database != 0 {
        check_login(&connection.send(cmd("SELECT").arg(address.database)).reply().await?)?;
    }
    Ok(connection)
}

/// `Ok(false)` for an error that lasts as long as this user and this server: not permitted, or not supported. Any other
/// error is temporary and returned.
fn permitted(error: &ServerError) -> Result<bool, StoreError> {
    let meant = from_server(error);
    tracing::debug!(error = %meant, "an optional command is not permitted");
    if meant.kind() == StoreErrorKind::NotPermitted || error.detail.starts_with("unknown") {
        Ok(false)
    } else {
        Err(meant)
    }
}

/// Checks the reply to HELLO or SELECT: the login, the version, the mode and the role.
fn check_login(reply: &Value) -> Result<(), StoreError> {
    let too_old =
        || StoreError::new(StoreErrorKind::Refused, "leasehold needs Redis 7.0 or Valkey 7.2, or a later version");
    match reply {
        Value::Error(ServerError { code, detail }) if code == "NOPROTO" || detail.starts_with("unknown command") => {
            Err(too_old())
        }
        Value::Error(error) => Err(from_server(error)),
        hello => {
            let version = hello_field(hello, "version").unwrap_or_default();
            let major = version.split('.').next().and_then(|major| major.parse::<u64>().ok());
            if major.is_some_and(|major| major < OLDEST_MAJOR) {
                return Err(too_old());
            }
            if let Some(why) = hello_field(hello, "mode").and_then(unusable_mode) {
                return Err(StoreError::new(StoreErrorKind::Refused, why));
            }
            if is_replica(hello) { Err(replica()) } else { Ok(()) }
        }
    }
}

/// Reads a field of the reply to HELLO.
fn hello_field<'a>(hello: &'a Value, field: &str) -> Option<&'a str> {
    let Value::Map(fields) = hello else { return None };
    fields.iter().find(|(name, _)| word(name) == Some(field)).and_then(|(_, value)| word(value))
}

/// The reason why a server of this mode cannot be used.
fn unusable_mode(mode: &str) -> Option<&'static str> {
    match mode {
        "cluster" => Some(
            "the server is a node of a Redis Cluster, which leasehold does not support; \
             use the address of a server with cluster-enabled no",
        ),
        "sentinel" => {
            Some("the server is a Sentinel and keeps no data; use the address of the primary that it monitors")
        }
        _ => None,
    }
}

/// Whether the reply to HELLO comes from a replica.
pub(crate) fn is_replica(hello: &Value) -> bool {
    hello_field(hello, "role").is_some_and(|role| !matches!(role, "master" | "primary"))
}

/// The error for a replica. It is temporary, because a failover usually changes the address that the name resolves to.
pub(crate) fn replica() -> StoreError {
    let what_next = "retrying, with a new DNS lookup, until a primary answers";
    StoreError::new(StoreErrorKind::ReadOnly, what_next)
}

/// Names this connection, reads its identity and kills the previous one.
fn identify(previous: Option<&Identity>) -> Pipeline {
    let mut pipe = Pipeline::with_capacity(3);
    pipe.cmd("CLIENT").arg(["SETNAME", "leasehold"]);
    pipe.cmd("CLIENT").arg("INFO");
    // Without a previous connection this matches no client, and the reply shows whether CLIENT KILL is permitted.
    let (id, addr) = previous.map_or(("1", "0.0.0.0:0"), |p| (p.id.as_str(), p.addr.as_str()));
    pipe.cmd("CLIENT").arg(["KILL", "ID", id, "ADDR", addr, "SKIPME", "yes"]);
    pipe
}

/// How far the server's wall clock is ahead of ours, in milliseconds, from the reply to the raise script.
fn clock_ahead_ms(raised: Value, before_ms: u64) -> Result<i64, StoreError> {
    if let Value::Error(error) = &raised {
        return Err(from_server(error));
    }
    let fields = items(raised, "raise")?;
    let server_us = fields.get(1).and_then(number).ok_or_else(|| unexpected_reply("raise"))?;
    let ours_ms = before_ms.midpoint(clock::wall_ms());
    Ok(i64::try_from(server_us / 1_000).unwrap_or(0) - i64::try_from(ours_ms).unwrap_or(0))
}

impl Identity {
    /// Parses `id=3 addr=127.0.0.1:60000 …`.
    fn parse(info: &str) -> Option<Self> {
        let field = |name: &str| info.split_whitespace().find_map(|f| f.strip_prefix(name)).map(str::to_owned);
        Some(Self { id: field("id=")?, addr: field("addr=")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_read_from_the_servers_line() {
        let line = "id=3 addr=127.0.0.1:60000 laddr=127.0.0.1:6379 fd=8 name=leasehold age=0";
        let identity = Identity::parse(line);
        assert_eq!(identity, Some(Identity { id: "3".into(), addr: "127.0.0.1:60000".into() }));
        assert_eq!(Identity::parse("nothing"), None);
    }

    #[test]
    fn a_server_that_is_too_old_is_refused_with_an_explanation() {
        let hello = |version: &str| {
            let field = |text: &str| Value::Bulk(text.into());
            Value::Map(vec![(field("server"), field("redis")), (field("version"), field(version))])
        };
        assert!(
            check_login(&hello("7.0.15")).is_ok()
                && check_login(&hello("9.1.2")).is_ok()
                && check_login(&hello("odd")).is_ok()
        );
        let error = |code: &str, detail: &str| Value::Error(ServerError { code: code.into(), detail: detail.into() });
        for old in [hello("6.2.1"), error("ERR", "unknown command `HELLO`"), error("NOPROTO", "no such protocol")] {
            let refused = check_login(&old).expect_err("too old");
            assert_eq!(refused.kind(), StoreErrorKind::Refused);
        }
        let wrong = check_login(&error("WRONGPASS", "invalid username-password pair")).expect_err("rejected");
        assert_eq!(wrong.kind(), StoreErrorKind::NotAuthenticated);
    }

    #[test]
    fn only_a_primary_outside_a_cluster_is_used() {
        let hello = |field: &str, value: &str| {
            let text = |text: &str| Value::Bulk(text.into());
            Value::Map(vec![(text("version"), text("7.0.15")), (text(field), text(value))])
        };
        assert!(check_login(&hello("role", "master")).is_ok() && check_login(&hello("mode", "standalone")).is_ok());
        for (field, value, kind) in [
            ("role", "replica", StoreErrorKind::ReadOnly),
            ("mode", "cluster", StoreErrorKind::Refused),
            ("mode", "sentinel", StoreErrorKind::Refused),
        ] {
            assert_eq!(check_login(&hello(field, value)).expect_err(value).kind(), kind);
        }
    }
}

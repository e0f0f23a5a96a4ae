//! One connection: made, told who we are, listening, with fences raised and scripts loaded.

use std::sync::Arc;

use super::address::Address;
use super::ear::Ear;
use super::errors::{from_server, strange};
use super::resp::{Cmd, Pipeline, ServerError, Value, cmd};
use super::scripts::{self, Script};
use super::wire::{Hear, Wire};
use super::{RedisOptions, keys};
use crate::clock::{self, Moment};
use crate::facts::Fence;
use crate::store::{StoreError, StoreErrorKind};

/// The oldest server whose commands do what we need: `PEXPIRE … GT`, SPUBLISH.
const OLDEST_MAJOR: u64 = 7;

/// A connection that is fit for use.
pub(super) struct Conn {
    wire: Wire,
    pub(super) ear: Arc<Ear>,
    pub(super) identity: Option<Identity>,
    /// A moment, and what the server's wall clock showed then.
    opened: (Moment, u64),
    /// Whether a connection of ours that broke can be ended for certain: then nothing it sent is carried
    /// out later.
    pub(super) may_kill: bool,
    /// Whether the server took our subscription. Without it waiters have to poll.
    pub(super) subscribed: bool,
}

/// How the server knows a connection. A number alone could be another's after a restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    id: String,
    addr: String,
}

/// A reply, and the moment before its request was sent.
pub(super) struct Answer<T> {
    pub(super) asked_at: Moment,
    pub(super) reply: T,
}

impl Conn {
    /// Connects, logs in, and does the rest in one round trip. `seen` is the highest fence this process
    /// knows of, `previous` its last connection.
    pub(super) async fn open(
        address: &Address,
        options: &RedisOptions,
        inbox: &str,
        ear: Ear,
        seen: u64,
        previous: Option<&Identity>,
    ) -> Result<Self, StoreError> {
        let ear = Arc::new(ear);
        let wire = open_another(address, options, ear.clone()).await?;
        let (before, before_ms) = (Moment::now(), clock::wall_ms());
        // Our previous connection is ended before anything else: commands it sent may still run otherwise.
        let who = wire.ask_all(&introduce(previous));
        let subscribing = wire.ask_push(cmd("SSUBSCRIBE").arg(inbox), "ssubscribe", inbox);
        let mut load = Pipeline::default();
        // Whoever may not load scripts sends them whole when they are needed.
        scripts::all().for_each(|script| load.add(script.load()));
        let mut raise = scripts::RAISE.eval();
        raise.arg(1_usize).arg(keys::FENCE).arg(seen).arg(inbox);
        let (loading, raising) = (wire.ask_all(&load), wire.ask(&raise));

        let who = who.all().await?;
        let subscribed = match subscribing.reply().await? {
            Value::Push(_) => true,
            Value::Error(error) => permitted(&error)?,
            _ => false,
        };
        loading.all().await?;
        let ahead_ms = clock_ahead_ms(raising.reply().await?, before_ms)?;

        // None of these must be permitted. A connection that cannot be named cannot be ended either.
        let identity = who.get(1).and_then(text).as_deref().and_then(Identity::parse);
        let may_kill = match who.get(2) {
            Some(Value::Error(error)) => permitted(error)?,
            _ => identity.is_some(),
        };
        let opened = (before, before_ms.saturating_add_signed(ahead_ms));
        Ok(Self { wire, ear, identity, opened, may_kill, subscribed })
    }

    /// The server's wall clock, as far as can be told from here: counted from when the connection was opened by a clock
    /// that nobody sets.
    pub(super) fn server_ms(&self) -> u64 {
        let (opened, server_ms) = self.opened;
        server_ms.saturating_add(u64::try_from(opened.until(Moment::now()).as_millis()).unwrap_or(0))
    }

    /// How far this process's wall clock is ahead of the server's; 0 below a second, which the way there explains.
    pub(super) fn wall_ahead_ms(&self) -> i64 {
        let ahead = i64::try_from(clock::wall_ms()).unwrap_or(0) - i64::try_from(self.server_ms()).unwrap_or(0);
        if ahead.abs() < 1_000 { 0 } else { ahead }
    }

    /// Not to be used any more.
    pub(super) fn break_off(&self) {
        self.wire.break_off();
    }

    /// The server became a replica: the connection is not used any more, and the primary is looked for.
    pub(super) fn leave_replica(&self) {
        tracing::warn!("the server became a replica: its primary is looked for");
        self.break_off();
    }

    pub(super) fn is_broken(&self) -> bool {
        self.wire.is_broken()
    }

    /// Waits until it broke.
    pub(super) async fn broken(&self) {
        self.wire.broken().await;
    }

    /// Sends one command. An error reply is an error.
    pub(super) async fn ask(&self, cmd: &Cmd) -> Result<Answer<Value>, StoreError> {
        let answer = self.ask_raw(cmd).await?;
        match &answer.reply {
            Value::Error(error) => Err(from_server(error)),
            _ => Ok(answer),
        }
    }

    /// Sends one command; an error reply is a reply.
    pub(super) async fn ask_raw(&self, cmd: &Cmd) -> Result<Answer<Value>, StoreError> {
        let asked = self.wire.ask(cmd);
        let asked_at = asked.asked_at;
        Ok(Answer { asked_at, reply: asked.reply().await? })
    }

    /// Sends several commands in one write, not as a transaction. Error replies stand among the others.
    pub(super) async fn ask_all(&self, pipe: &Pipeline) -> Result<Answer<Vec<Value>>, StoreError> {
        let asked = self.wire.ask_all(pipe);
        let asked_at = asked.asked_at;
        Ok(Answer { asked_at, reply: asked.all().await? })
    }

    /// Ends our subscription, as the last thing this connection does.
    pub(super) async fn unsubscribe(&self, inbox: &str) {
        // Whatever it answers.
        let _ = self.wire.ask_push(cmd("SUNSUBSCRIBE").arg(inbox), "sunsubscribe", inbox).reply().await;
    }

    /// Runs a script by its name, or sends it whole where the server does not have it.
    pub(super) async fn run(
        &self,
        script: &Script,
        keys: &[&str],
        args: impl Fn(&mut Cmd),
    ) -> Result<Answer<Value>, StoreError> {
        let mut cmd = script.evalsha();
        cmd.arg(keys.len()).arg(keys);
        args(&mut cmd);
        let answer = self.ask_raw(&cmd).await?;
        match &answer.reply {
            Value::Error(error) if error.is_no_script() => {
                let mut cmd = script.eval();
                cmd.arg(keys.len()).arg(keys);
                args(&mut cmd);
                Box::pin(self.ask(&cmd)).await
            }
            Value::Error(error) => Err(from_server(error)),
            _ => Ok(answer),
        }
    }
}

/// A connection beside the shared one, logged in.
pub(super) async fn open_another(
    address: &Address,
    options: &RedisOptions,
    ear: Arc<dyn Hear>,
) -> Result<Wire, StoreError> {
    let wire = Wire::open(address, options, ear).await?;
    let mut hello = cmd("HELLO");
    hello.arg("3");
    if let Some((user, password)) = &address.login {
        hello.arg(["AUTH", user, password]);
    }
    // Before anything else is said: nothing of ours is to be done in another database or as another user.
    let_in(&wire.ask(&hello).reply().await?)?;
    if address.database != 0 {
        let_in(&wire.ask(cmd("SELECT").arg(address.database)).reply().await?)?;
    }
    Ok(wire)
}

/// A refusal that stands for as long as the user and the server are what they are: `Ok(false)`. Anything
/// else passes, and says nothing about the next time.
fn permitted(error: &ServerError) -> Result<bool, StoreError> {
    let meant = from_server(error);
    tracing::debug!(error = %meant, "not all that would be useful is permitted");
    if meant.kind() == StoreErrorKind::NotPermitted || error.detail.starts_with("unknown") {
        Ok(false)
    } else {
        Err(meant)
    }
}

/// Whether the server took the login.
fn let_in(reply: &Value) -> Result<(), StoreError> {
    let too_old = || StoreError::new(StoreErrorKind::Refused, "leasehold needs Redis 7.0 or Valkey 7.2 at least");
    match reply {
        Value::Error(ServerError { code, detail }) if code == "NOPROTO" || detail.starts_with("unknown command") => {
            Err(too_old())
        }
        Value::Error(error) => Err(from_server(error)),
        hello => {
            let version = about(hello, "version").unwrap_or_default();
            let major = version.split('.').next().and_then(|major| major.parse::<u64>().ok());
            if major.is_some_and(|major| major < OLDEST_MAJOR) {
                return Err(too_old());
            }
            if let Some(why) = about(hello, "mode").and_then(unusable_mode) {
                return Err(StoreError::new(StoreErrorKind::Refused, why));
            }
            if is_replica(hello) { Err(replica()) } else { Ok(()) }
        }
    }
}

/// A field of the reply to HELLO.
fn about<'a>(hello: &'a Value, field: &str) -> Option<&'a str> {
    let Value::Map(fields) = hello else { return None };
    fields.iter().find(|(name, _)| said(name) == Some(field)).and_then(|(_, value)| said(value))
}

/// Why a server of this mode cannot be used.
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
pub(super) fn is_replica(hello: &Value) -> bool {
    about(hello, "role").is_some_and(|role| !matches!(role, "master" | "primary"))
}

/// The error for a replica. It passes, because a failover is usually followed by a change of the name's address.
pub(super) fn replica() -> StoreError {
    let what_next = "it is tried again, and its name resolved anew, until a primary answers";
    StoreError::new(StoreErrorKind::ReadOnly, what_next)
}

/// Says who we are, and ends our previous connection.
fn introduce(previous: Option<&Identity>) -> Pipeline {
    let mut pipe = Pipeline::with_capacity(3);
    pipe.cmd("CLIENT").arg(["SETNAME", "leasehold"]);
    pipe.cmd("CLIENT").arg("INFO");
    // Without a previous connection nobody is meant, and the answer says whether it is permitted.
    let (id, addr) = previous.map_or(("1", "0.0.0.0:0"), |p| (p.id.as_str(), p.addr.as_str()));
    pipe.cmd("CLIENT").arg(["KILL", "ID", id, "ADDR", addr, "SKIPME", "yes"]);
    pipe
}

/// How far the server's wall clock is ahead of ours, from the answer to a raise.
fn clock_ahead_ms(raised: Value, before_ms: u64) -> Result<i64, StoreError> {
    if let Value::Error(error) = &raised {
        return Err(from_server(error));
    }
    let fields = items(raised, "raise")?;
    let server_us = fields.get(1).and_then(number).ok_or_else(|| strange("raise"))?;
    let ours_ms = before_ms.midpoint(clock::wall_ms());
    Ok(i64::try_from(server_us / 1_000).unwrap_or(0) - i64::try_from(ours_ms).unwrap_or(0))
}

impl Identity {
    /// Reads `id=3 addr=127.0.0.1:60000 …`.
    fn parse(info: &str) -> Option<Self> {
        let field = |name: &str| info.split_whitespace().find_map(|f| f.strip_prefix(name)).map(str::to_owned);
        Some(Self { id: field("id=")?, addr: field("addr=")? })
    }
}

/// A reply in words.
pub(super) fn said(value: &Value) -> Option<&str> {
    match value {
        Value::Bulk(bytes) => std::str::from_utf8(bytes).ok(),
        Value::Simple(text) => Some(text),
        _ => None,
    }
}

/// Any text, readable or not.
pub(super) fn text(value: &Value) -> Option<String> {
    match value {
        Value::Bulk(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::Simple(text) => Some(text.clone()),
        _ => None,
    }
}

/// A number, also one written as text.
pub(super) fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(n) => u64::try_from(*n).ok(),
        Value::Bulk(digits) => std::str::from_utf8(digits).ok()?.parse().ok(),
        _ => None,
    }
}

/// A fence as the scripts write it.
pub(super) fn fence(value: &Value) -> Option<Fence> {
    number(value).filter(|n| (1..=Fence::MAX).contains(n)).map(Fence::new)
}

/// The items of a list reply.
pub(super) fn items(value: Value, what: &'static str) -> Result<Vec<Value>, StoreError> {
    match value {
        Value::Array(items) => Ok(items),
        _ => Err(strange(what)),
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
    fn a_server_that_is_too_old_is_refused_in_words() {
        let hello = |version: &str| {
            let field = |text: &str| Value::Bulk(text.into());
            Value::Map(vec![(field("server"), field("redis")), (field("version"), field(version))])
        };
        assert!(let_in(&hello("7.0.15")).is_ok() && let_in(&hello("9.1.2")).is_ok() && let_in(&hello("odd")).is_ok());
        let error = |code: &str, detail: &str| Value::Error(ServerError { code: code.into(), detail: detail.into() });
        for old in [hello("6.2.1"), error("ERR", "unknown command `HELLO`"), error("NOPROTO", "no such protocol")] {
            let refused = let_in(&old).expect_err("too old");
            assert_eq!(refused.kind(), StoreErrorKind::Refused);
        }
        let wrong = let_in(&error("WRONGPASS", "invalid username-password pair")).expect_err("not let in");
        assert_eq!(wrong.kind(), StoreErrorKind::NotAuthenticated);
    }

    #[test]
    fn only_a_primary_that_stands_alone_is_used() {
        let hello = |field: &str, value: &str| {
            let text = |text: &str| Value::Bulk(text.into());
            Value::Map(vec![(text("version"), text("7.0.15")), (text(field), text(value))])
        };
        assert!(let_in(&hello("role", "master")).is_ok() && let_in(&hello("mode", "standalone")).is_ok());
        for (field, value, kind) in [
            ("role", "replica", StoreErrorKind::ReadOnly),
            ("mode", "cluster", StoreErrorKind::Refused),
            ("mode", "sentinel", StoreErrorKind::Refused),
        ] {
            assert_eq!(let_in(&hello(field, value)).expect_err(value).kind(), kind);
        }
    }
}

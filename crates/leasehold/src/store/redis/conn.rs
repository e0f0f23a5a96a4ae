//! One connection: made, told who we are, listening, with fences raised and scripts loaded.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, Pipeline, PushInfo, ServerErrorKind, Value};

use super::ear::Ear;
use super::errors::{from_redis, from_server, strange};
use super::scripts::{self, Script};
use super::{RedisOptions, keys};
use crate::clock::{self, Moment};
use crate::facts::Fence;
use crate::store::{StoreError, StoreErrorKind};

/// Requests that can wait for the connection to take them.
const BACKLOG: usize = 1_024;

/// Requests that pile up behind a write go out together up to this size. By default many small writes
/// are made of them.
const WRITE_AT_MOST: usize = 128 * 1024;

/// A connection that is fit for use.
pub(super) struct Conn {
    redis: MultiplexedConnection,
    pub(super) ear: Arc<Ear>,
    pub(super) identity: Option<Identity>,
    /// The server's wall clock less ours.
    ahead_ms: i64,
    /// Whether our previous connection is certain to carry out nothing more.
    pub(super) previous_ended: bool,
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
    /// Connects. `seen` is the highest fence this process knows of, `previous` its last connection.
    pub(super) async fn open(
        client: &Client,
        options: &RedisOptions,
        inbox: &str,
        ear: Ear,
        seen: u64,
        previous: Option<&Identity>,
    ) -> Result<Self, StoreError> {
        let ear = Arc::new(ear);
        let hears = ear.clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(options.connect_timeout))
            .set_response_timeout(Some(options.response_timeout))
            .set_pipeline_buffer_size(BACKLOG)
            .set_write_backpressure_boundary(WRITE_AT_MOST)
            .set_push_sender(move |info: PushInfo| {
                hears.push(&info);
                Ok::<(), redis::aio::SendError>(())
            });
        let redis = client.get_multiplexed_async_connection_with_config(&config).await.map_err(|e| from_redis(&e))?;
        let mut conn = Self { redis, ear, identity: None, ahead_ms: 0, previous_ended: true };
        conn.introduce(previous).await?;
        let mut subscribe = redis::cmd("SSUBSCRIBE");
        subscribe.arg(inbox);
        conn.ask(&subscribe).await?;
        conn.raise_fences(seen).await?;
        let mut load = Pipeline::new();
        for script in scripts::all() {
            load.add_command(script.load());
        }
        // Whoever may not load scripts sends them whole when they are needed.
        conn.ask_all(&load).await?;
        Ok(conn)
    }

    /// Says who we are, and ends our previous connection: commands it sent may still run otherwise.
    async fn introduce(&mut self, previous: Option<&Identity>) -> Result<(), StoreError> {
        let mut pipe = Pipeline::new();
        pipe.cmd("CLIENT").arg("SETNAME").arg("leasehold");
        pipe.cmd("CLIENT").arg("INFO");
        if let Some(Identity { id, addr }) = previous {
            pipe.cmd("CLIENT").arg(&["KILL", "ID", id, "ADDR", addr, "SKIPME", "yes"]);
        }
        let replies = self.ask_all(&pipe).await?.reply;
        // None of these must be permitted.
        self.identity = replies.get(1).and_then(text).as_deref().and_then(Identity::parse);
        if let Some(Value::ServerError(error)) = replies.get(2) {
            self.previous_ended = false;
            tracing::debug!(error = %from_server(error), "the previous connection could not be ended");
        }
        // A connection that cannot be named cannot be ended later either.
        self.previous_ended &= self.identity.is_some();
        Ok(())
    }

    async fn raise_fences(&mut self, seen: u64) -> Result<(), StoreError> {
        let before_ms = clock::wall_ms();
        let args = |cmd: &mut Cmd| {
            cmd.arg(seen);
        };
        let raised = self.run(&scripts::RAISE, &[keys::FENCE], args).await?.reply;
        let fields = items(raised, "raise")?;
        let [_, Some(server_us)] = [fields.first(), fields.get(1)].map(|f| f.and_then(number)) else {
            return Err(strange("raise"));
        };
        let ours_ms = before_ms.midpoint(clock::wall_ms());
        self.ahead_ms = i64::try_from(server_us / 1_000).unwrap_or(0) - i64::try_from(ours_ms).unwrap_or(0);
        Ok(())
    }

    /// The server's wall clock, as far as can be told from here.
    pub(super) fn server_ms(&self) -> u64 {
        clock::wall_ms().saturating_add_signed(self.ahead_ms)
    }

    /// Sends one command. An error reply is an error.
    pub(super) async fn ask(&self, cmd: &Cmd) -> Result<Answer<Value>, StoreError> {
        let answer = self.ask_raw(cmd).await?;
        match &answer.reply {
            Value::ServerError(error) => Err(from_server(error)),
            _ => Ok(answer),
        }
    }

    /// Sends one command; an error reply is a reply.
    pub(super) async fn ask_raw(&self, cmd: &Cmd) -> Result<Answer<Value>, StoreError> {
        let asked_at = Moment::now();
        let reply = self.redis.clone().send_packed_command(cmd).await;
        self.settle(asked_at, reply)
    }

    /// Sends several commands in one write, not as a transaction. Error replies stand among the others.
    pub(super) async fn ask_all(&self, pipe: &Pipeline) -> Result<Answer<Vec<Value>>, StoreError> {
        let asked_at = Moment::now();
        let reply = self.redis.clone().send_packed_commands(pipe, 0, pipe.len()).await;
        let answer = self.settle(asked_at, reply)?;
        if answer.reply.len() == pipe.len() { Ok(answer) } else { Err(strange("a pipeline")) }
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
            Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript) => {
                let mut cmd = script.eval();
                cmd.arg(keys.len()).arg(keys);
                args(&mut cmd);
                Box::pin(self.ask(&cmd)).await
            }
            Value::ServerError(error) => Err(from_server(error)),
            _ => Ok(answer),
        }
    }

    fn settle<T>(&self, asked_at: Moment, reply: redis::RedisResult<T>) -> Result<Answer<T>, StoreError> {
        match reply {
            Ok(reply) if self.ear.answered(asked_at) => Ok(Answer { asked_at, reply }),
            Ok(_) => Err(StoreError::new(StoreErrorKind::Unreachable, "the server ended our subscription")),
            Err(error) => {
                let error = from_redis(&error);
                if error.may_have_happened() {
                    self.ear.break_off();
                }
                Err(error)
            }
        }
    }
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
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

/// Any text, readable or not.
pub(super) fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text.clone()),
        _ => None,
    }
}

/// A number, also one written as text.
pub(super) fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(n) => u64::try_from(*n).ok(),
        Value::BulkString(digits) => std::str::from_utf8(digits).ok()?.parse().ok(),
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
}

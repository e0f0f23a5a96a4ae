//! The client without a store, so that the benchmark can compare it with the `redis` crate.

use std::sync::Arc;

use super::super::options::RedisOptions;
use super::address::Address;
use super::connection::{Connection, PushHandler};
use super::reply::{from_server, text};
use super::resp::{Cmd, Pipeline, Value, cmd};
use super::session::open_connection;
use crate::clock::Moment;
use crate::store::StoreError;

/// A connection that is logged in. Dropping it closes it.
#[doc(hidden)]
pub struct BareClient(Connection);

/// Calls a function for each push.
struct CallOnPush<F>(F);

impl<F: Fn() + Send + Sync + 'static> PushHandler for CallOnPush<F> {
    fn answered(&self, _: Moment) {}

    fn push(&self, _: &[Value]) -> Result<(), StoreError> {
        (self.0)();
        Ok(())
    }
}

impl BareClient {
    /// Connects and logs in. The I/O task calls `on_push` for each push.
    ///
    /// # Errors
    /// When the URL cannot be used, or the server cannot be reached or rejects the login.
    pub async fn connect(url: &str, on_push: impl Fn() + Send + Sync + 'static) -> Result<Self, StoreError> {
        let address = Address::parse(url)?;
        open_connection(&address, &RedisOptions::default(), Arc::new(CallOnPush(on_push))).await.map(Self)
    }

    /// Subscribes to a shard channel.
    ///
    /// # Errors
    /// When the server does not answer or rejects the subscription.
    pub async fn subscribe(&self, channel: &str) -> Result<(), StoreError> {
        let subscribing = self.0.send_subscription(cmd("SSUBSCRIBE").arg(channel), "ssubscribe", channel);
        plain(subscribing.reply().await?).map(drop)
    }

    /// Sends one command and returns its reply as text.
    ///
    /// # Errors
    /// When the server does not answer or replies with an error.
    pub async fn call(&self, parts: &[&str]) -> Result<Option<String>, StoreError> {
        plain(self.0.send(&command(parts)).reply().await?)
    }

    /// Sends several commands in one write and waits for all replies.
    ///
    /// # Errors
    /// When the server does not answer or replies with an error.
    pub async fn call_all(&self, commands: &[Vec<&str>]) -> Result<(), StoreError> {
        let mut pipe = Pipeline::with_capacity(commands.len());
        commands.iter().for_each(|parts| pipe.add(command(parts)));
        self.0.send_all(&pipe).all().await?.into_iter().try_for_each(|reply| plain(reply).map(drop))
    }
}

fn command(parts: &[&str]) -> Cmd {
    let mut command = cmd(parts[0]);
    command.arg(&parts[1..]);
    command
}

fn plain(reply: Value) -> Result<Option<String>, StoreError> {
    match reply {
        Value::Error(error) => Err(from_server(&error)),
        Value::Int(number) => Ok(Some(number.to_string())),
        other => Ok(text(&other)),
    }
}

//! The emergency release, used when the usual one fails: it opens its own connection, runs no script and hands the lock
//! to no waiter. Waiters find the lock free with their next request.

use std::sync::Arc;

use super::RedisStore;
use super::client::{Pipeline, PushHandler, Value, from_server, open_connection, unexpected_reply};
use super::value::{HolderRecord, read_command};
use crate::clock::Moment;
use crate::facts::{LockName, Token};
use crate::store::{Release, StoreError, StoreErrorKind};

/// Attempts before giving up, when the value changes each time between reading and deleting (a waiter sets its flag).
const ATTEMPTS: usize = 5;

/// Ignores pushes: this connection subscribes to nothing.
struct IgnorePushes;

impl PushHandler for IgnorePushes {
    fn answered(&self, _: Moment) {}

    fn push(&self, _: &[Value]) -> Result<(), StoreError> {
        Ok(())
    }
}

impl RedisStore {
    pub(super) async fn release_without_scripts(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        if self.client.is_forked() {
            return Err(StoreErrorKind::Forked.into());
        }
        let key = self.keys.key(name)?;
        let connection = open_connection(&self.client.address, &self.client.options, Arc::new(IgnorePushes)).await?;
        for _ in 0..ATTEMPTS {
            let mut look = Pipeline::with_capacity(2);
            look.cmd("WATCH").arg(&key);
            look.add(read_command(&key));
            let ours = match &connection.send_all(&look).all().await?[..] {
                [Value::Error(error), _] => return Err(from_server(error)),
                [_, Value::Bulk(value)] => HolderRecord::parse(value).is_some_and(|record| record.token == *token),
                [_, Value::Error(error)] if from_server(error).kind() != StoreErrorKind::WrongType => {
                    return Err(from_server(error));
                }
                _ => false,
            };
            if !ours {
                return Ok(Release::NotOwner);
            }
            let mut delete = Pipeline::with_capacity(3);
            delete.cmd("MULTI");
            delete.cmd("DEL").arg(&key);
            delete.cmd("EXEC");
            match connection.send_all(&delete).all().await?.pop() {
                // The value changed in between: read it again.
                Some(Value::Nil) => {}
                Some(Value::Array(deleted)) if deleted == [Value::Int(1)] => return Ok(Release::Released),
                Some(Value::Array(_)) => return Ok(Release::NotOwner),
                Some(Value::Error(error)) => return Err(from_server(&error)),
                _ => return Err(unexpected_reply("EXEC")),
            }
        }
        Err(StoreError::new(StoreErrorKind::Busy, "the lock's value changed at every attempt"))
    }
}

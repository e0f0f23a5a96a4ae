//! A release for when the usual one fails: a connection of its own, no script, nothing handed on.
//! Waiters find the lock free when they ask again.

use std::sync::Arc;

use super::RedisStore;
use super::conn::open_another;
use super::errors::{from_server, strange};
use super::resp::{Pipeline, Value};
use super::value::{Record, read_command};
use super::wire::Hear;
use crate::clock::Moment;
use crate::facts::{LockName, Token};
use crate::store::{Release, StoreError, StoreErrorKind};

/// How often a value may change under our eyes (a waiter sets its flag) before we give up.
const ATTEMPTS: usize = 5;

/// Nobody subscribes here.
struct Deaf;

impl Hear for Deaf {
    fn answered(&self, _: Moment) {}

    fn push(&self, _: &[Value]) -> Result<(), StoreError> {
        Ok(())
    }
}

impl RedisStore {
    pub(super) async fn release_without_scripts(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        if self.link.is_forked() {
            return Err(StoreErrorKind::Forked.into());
        }
        let key = self.keys.key(name).map_err(super::keys::refused)?;
        let wire = open_another(&self.link.address, &self.link.options, Arc::new(Deaf)).await?;
        for _ in 0..ATTEMPTS {
            let mut look = Pipeline::with_capacity(2);
            look.cmd("WATCH").arg(&key);
            look.add(read_command(&key));
            let ours = match &wire.ask_all(&look).all().await?[..] {
                [Value::Error(error), _] => return Err(from_server(error)),
                [_, Value::Bulk(value)] => Record::parse(value).is_some_and(|record| record.token == *token),
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
            match wire.ask_all(&delete).all().await?.pop() {
                // The value changed in between: look again.
                Some(Value::Nil) => {}
                Some(Value::Array(deleted)) if deleted == [Value::Int(1)] => return Ok(Release::Released),
                Some(Value::Array(_)) => return Ok(Release::NotOwner),
                Some(Value::Error(error)) => return Err(from_server(&error)),
                _ => return Err(strange("EXEC")),
            }
        }
        Err(StoreError::new(StoreErrorKind::Busy, "the lock's value changed at every attempt"))
    }
}

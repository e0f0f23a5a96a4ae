//! A release for when the usual one fails: a connection of its own, no script, nothing handed on.
//! Waiters find the lock free when they ask again.

use redis::{AsyncConnectionConfig, Pipeline, Value};

use super::RedisStore;
use super::errors::{from_redis, strange};
use super::value::Record;
use crate::facts::{LockName, Token};
use crate::store::{Release, StoreError, StoreErrorKind};

/// How often a value may change under our eyes (a waiter sets its flag) before we give up.
const ATTEMPTS: usize = 5;

impl RedisStore {
    pub(super) async fn release_without_scripts(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        if self.link.is_forked() {
            return Err(StoreErrorKind::Forked.into());
        }
        let key = self.keys.key(name).map_err(super::keys::refused)?;
        let options = &self.link.options;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(options.connect_timeout))
            .set_response_timeout(Some(options.response_timeout));
        let client = self.link.client();
        let mut conn =
            client.get_multiplexed_async_connection_with_config(&config).await.map_err(|e| from_redis(&e))?;
        for _ in 0..ATTEMPTS {
            let watch: redis::RedisResult<()> = redis::cmd("WATCH").arg(&key).query_async(&mut conn).await;
            watch.map_err(|e| from_redis(&e))?;
            let value: Value = match redis::cmd("GET").arg(&key).query_async(&mut conn).await {
                Ok(value) => value,
                Err(error) if from_redis(&error).kind() == StoreErrorKind::WrongType => Value::Nil,
                Err(error) => return Err(from_redis(&error)),
            };
            let ours = match &value {
                Value::BulkString(value) => Record::parse(value).is_some_and(|record| record.token == *token),
                _ => false,
            };
            if !ours {
                return Ok(Release::NotOwner);
            }
            let mut delete = Pipeline::new();
            delete.atomic().cmd("DEL").arg(&key);
            match delete.query_async(&mut conn).await.map_err(|e| from_redis(&e))? {
                // The value changed in between: look again.
                Value::Nil => {}
                Value::Array(deleted) if deleted == [Value::Int(1)] => return Ok(Release::Released),
                Value::Array(_) => return Ok(Release::NotOwner),
                _ => return Err(strange("EXEC")),
            }
        }
        Err(StoreError::new(StoreErrorKind::Busy, "the lock's value changed at every attempt"))
    }
}

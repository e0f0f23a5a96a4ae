//! The options of a connection.

use std::time::Duration;

use crate::machine::Limits;

/// Options of a connection to Redis or Valkey.
#[derive(Debug, Clone)]
pub struct RedisOptions {
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) lazy_connect: bool,
    pub(super) events: bool,
    pub(super) limits: Limits,
}

impl Default for RedisOptions {
    /// 2 s to connect and 2 s for a reply: longer than a server is usually busy, and short enough to try again before a
    /// lease of 30 s ends. Events are published.
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            response_timeout: Duration::from_secs(2),
            lazy_connect: false,
            events: true,
            limits: Limits::DEFAULT,
        }
    }
}

impl RedisOptions {
    /// Limits one attempt to connect.
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.connect_timeout = limit;
        self
    }

    /// Limits the wait for a reply, and the wait of a request for a connection while there is none.
    pub fn response_timeout(mut self, limit: Duration) -> Self {
        self.response_timeout = limit;
        self
    }

    /// Whether [`connect`](super::RedisStore::connect) succeeds while the server cannot be reached yet. The store then
    /// retries in the background, and requests fail meanwhile. A permanent error, such as a wrong password, is still
    /// returned.
    pub fn lazy_connect(mut self, later: bool) -> Self {
        self.lazy_connect = later;
        self
    }

    /// Whether to publish lock events for followers.
    pub fn events(mut self, publish: bool) -> Self {
        self.events = publish;
        self
    }

    /// Sets how long a grant lasts until it is confirmed, and how long a queue outlives its last waiter.
    #[cfg(any(test, feature = "test-hooks"))]
    #[doc(hidden)]
    pub fn limits(mut self, provisional: Duration, queue_ttl: Duration) -> Self {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        self.limits.provisional_ms = ms(provisional);
        self.limits.queue_ttl_ms = ms(queue_ttl);
        self
    }
}

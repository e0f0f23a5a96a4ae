//! Used by the expansion of `#[lock]`. It changes with the attribute.
#![allow(missing_docs, reason = "hidden, and documented where the attribute is")]

use std::time::Duration;

use crate::error::Error;
use crate::facts::LockName;
use crate::manager::LockManager;
use crate::options::OnUnavailable;
use crate::request::LockRequest;
use crate::scope::{Entered, Entry, OnLoss};

/// The options of one `#[lock]`, which were checked at compile time.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub ttl_ms: u64,
    pub wait_ms: u64,
    pub retry_ms: u64,
    pub max_hold_ms: Option<u64>,
    pub renew: bool,
    pub reentrant: bool,
    pub cancel_on_loss: bool,
    /// `None` for the manager's option.
    pub open: Option<bool>,
}

/// The return type of a function under `#[lock]`.
#[diagnostic::on_unimplemented(
    message = "a function under `#[lock]` returns `Result<T, E>` with `E: From<leasehold::Error>`, not `{Self}`",
    label = "not such a `Result`",
    note = "the error reports that the lock was not acquired or was lost"
)]
pub trait LockResult {
    fn from_error(error: Error) -> Self;
}

impl<T, E: From<Error>> LockResult for Result<T, E> {
    fn from_error(error: Error) -> Self {
        Err(error.into())
    }
}

pub fn request(locks: &LockManager, key: String) -> Result<LockRequest, Error> {
    Ok(locks.lock(key))
}

pub fn installed(key: String) -> Result<LockRequest, Error> {
    match LockManager::installed() {
        Some(locks) => Ok(locks.lock(key)),
        None => Err(Error::NotInstalled { name: LockName::new(key)? }),
    }
}

/// Runs a function under a lock. `from_error` is [`LockResult::from_error`], named where the return type is written, so that
/// the compiler reports an unsuitable type there, and once.
pub async fn run<R, F>(request: Result<LockRequest, Error>, call: Call, from_error: fn(Error) -> R, body: F) -> R
where
    F: Future<Output = R>,
{
    let entered = match request {
        Ok(request) => Entered::by(call.apply(request), if call.reentrant { Entry::Again } else { Entry::Once }).await,
        Err(error) => Err(error),
    };
    let entered = match entered {
        Ok(entered) => entered,
        Err(error) => return from_error(error),
    };
    let on_loss = if call.cancel_on_loss { OnLoss::Cancel } else { OnLoss::Continue };
    let done = entered.work(on_loss, body).await;
    entered.leave().await;
    done.unwrap_or_else(from_error)
}

impl Call {
    fn apply(&self, request: LockRequest) -> LockRequest {
        let mut request = request
            .ttl(Duration::from_millis(self.ttl_ms))
            .wait_up_to(Duration::from_millis(self.wait_ms))
            .retry_every(Duration::from_millis(self.retry_ms))
            .renew(self.renew);
        if let Some(hold) = self.max_hold_ms {
            request = request.max_hold(Duration::from_millis(hold));
        }
        match self.open {
            Some(true) => request.on_unavailable(OnUnavailable::FailOpen),
            Some(false) => request.on_unavailable(OnUnavailable::FailClosed),
            None => request,
        }
    }
}

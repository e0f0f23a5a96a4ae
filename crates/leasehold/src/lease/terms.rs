use std::time::Duration;

use crate::engine::wish::{Wait, Wish};
use crate::facts::{Invalid, LockName, Owner, Ttl};
use crate::options::{OnUnavailable, Options};

/// What a request asks for: lease, waiting, renewal, owner. Requests have the same methods; a value of its own serves
/// terms that many requests share.
///
/// What is not set comes from the request it is given to, or from the [`Options`](crate::Options) of the manager.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// # let locks = leasehold::LockManager::connect("memory:").await?;
/// use std::time::Duration;
/// use leasehold::lease::Terms;
///
/// let quick = Terms::new().ttl(Duration::from_secs(10)).wait_up_to(Duration::from_secs(2));
/// let order = locks.lock("order:42").terms(&quick).await?;
/// let gpu = locks.pool("gpu_lock", 0..4)?.acquire().terms(&quick).await?;
/// # drop((order, gpu)); Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Terms {
    ttl: Option<Ttl>,
    owner: Option<Owner>,
    wait: Option<Wait>,
    renew: Option<bool>,
    max_hold: Option<Duration>,
    fenced: Option<bool>,
    retry_every: Option<Duration>,
    on_unavailable: Option<OnUnavailable>,
    /// The first value that was refused.
    invalid: Option<Invalid>,
}

impl Terms {
    /// Returns terms without any setting.
    pub fn new() -> Self {
        Self::default()
    }

    setters!(ttl, wait_up_to, no_wait, owner, owned_by, renew, max_hold, unfenced, retry_every, on_unavailable);

    fn terms_mut(&mut self) -> &mut Self {
        self
    }

    /// Takes over what other terms set.
    pub(crate) fn merge(&mut self, other: &Self) {
        let other = other.clone();
        self.ttl = other.ttl.or(self.ttl);
        self.owner = other.owner.or(self.owner.take());
        self.wait = other.wait.or(self.wait);
        self.renew = other.renew.or(self.renew);
        self.max_hold = other.max_hold.or(self.max_hold);
        self.fenced = other.fenced.or(self.fenced);
        self.retry_every = other.retry_every.or(self.retry_every);
        self.on_unavailable = other.on_unavailable.or(self.on_unavailable);
        self.invalid = self.invalid.take().or(other.invalid);
    }

    /// Requires a fence and a store that answers, for work that must never run unprotected.
    pub(crate) fn require_protection(&mut self) {
        (self.fenced, self.on_unavailable) = (Some(true), Some(OnUnavailable::FailClosed));
    }

    pub(crate) fn set_ttl(&mut self, ttl: Duration) {
        match Ttl::new(ttl) {
            Ok(ttl) => self.ttl = Some(ttl),
            Err(invalid) => self.refuse(invalid),
        }
    }

    pub(crate) fn set_wait(&mut self, limit: Duration) {
        self.wait = Some(if limit.is_zero() { Wait::Not } else { Wait::UpTo(limit) });
    }

    pub(crate) fn set_owner(&mut self, task: &str) {
        match Owner::named(task) {
            Ok(owner) => self.owner = Some(owner),
            Err(invalid) => self.refuse(invalid),
        }
    }

    pub(crate) fn set_owned_by(&mut self, owner: Owner) {
        self.owner = Some(owner);
    }

    pub(crate) fn set_renew(&mut self, renew: bool) {
        self.renew = Some(renew);
    }

    pub(crate) fn set_max_hold(&mut self, limit: Duration) {
        self.max_hold = Some(limit);
    }

    pub(crate) fn set_fenced(&mut self, fenced: bool) {
        self.fenced = Some(fenced);
    }

    pub(crate) fn set_retry_every(&mut self, pause: Duration) {
        self.retry_every = Some(pause);
    }

    pub(crate) fn set_on_unavailable(&mut self, policy: OnUnavailable) {
        self.on_unavailable = Some(policy);
    }

    /// How long the request waits.
    pub(crate) fn wait(&self) -> Wait {
        self.wait.unwrap_or(Wait::Forever)
    }

    /// The request for one lock, with the defaults of its manager.
    pub(crate) fn wish(self, name: LockName, options: &Options) -> Result<Wish, Invalid> {
        if let Some(invalid) = self.invalid {
            return Err(invalid);
        }
        let ttl = self.ttl.unwrap_or(options.ttl);
        Ok(Wish {
            name,
            ttl,
            owner: self.owner.unwrap_or_else(|| options.owner.clone()),
            fenced: self.fenced.unwrap_or(true),
            renew_every: self.renew.unwrap_or(true).then(|| options.renew_every(ttl)),
            max_hold: self.max_hold,
            wait: self.wait.unwrap_or(Wait::Forever),
            retry_every: self.retry_every,
            on_unavailable: self.on_unavailable.unwrap_or(options.on_unavailable),
        })
    }

    fn refuse(&mut self, invalid: Invalid) {
        self.invalid.get_or_insert(invalid);
    }
}

/// Writes the methods by which a request sets its terms, for a type with `fn terms_mut(&mut self) -> &mut Terms`.
macro_rules! setters {
    ($($setter:ident),* $(,)?) => { $($crate::lease::terms::setters!(@ $setter);)* };
    (@ terms) => {
        /// Sets everything that other [`Terms`](crate::lease::Terms) set.
        pub fn terms(mut self, terms: &$crate::lease::Terms) -> Self {
            self.terms_mut().merge(terms);
            self
        }
    };
    (@ ttl) => {
        /// Sets how long the store keeps the lease when nothing renews it.
        pub fn ttl(mut self, ttl: ::std::time::Duration) -> Self {
            self.terms_mut().set_ttl(ttl);
            self
        }
    };
    (@ wait_up_to) => {
        /// Waits for at most `limit`, then answers [`Error::NotAcquired`](crate::Error::NotAcquired), or
        /// [`Error::PoolBusy`](crate::Error::PoolBusy) for a pool.
        pub fn wait_up_to(mut self, limit: ::std::time::Duration) -> Self {
            self.terms_mut().set_wait(limit);
            self
        }
    };
    (@ no_wait) => {
        /// Does not wait: answers [`Error::NotAcquired`](crate::Error::NotAcquired) at once when the lock is held, or
        /// [`Error::PoolBusy`](crate::Error::PoolBusy) when the members of a pool are.
        pub fn no_wait(self) -> Self {
            self.wait_up_to(::std::time::Duration::ZERO)
        }
    };
    (@ owner) => {
        /// Sets what people read who ask for the holder: a task name. Host and process id are added.
        pub fn owner(mut self, task: impl AsRef<str>) -> Self {
            self.terms_mut().set_owner(task.as_ref());
            self
        }
    };
    (@ owned_by) => {
        /// Sets the whole owner, for a request on behalf of another process.
        pub fn owned_by(mut self, owner: $crate::Owner) -> Self {
            self.terms_mut().set_owned_by(owner);
            self
        }
    };
    (@ renew) => {
        /// Sets whether the lease is renewed for as long as it is held, or ends after its ttl.
        pub fn renew(mut self, renew: bool) -> Self {
            self.terms_mut().set_renew(renew);
            self
        }
    };
    (@ max_hold) => {
        /// Sets the longest time a lease may be held, renewals included: after `limit` it counts as lost.
        pub fn max_hold(mut self, limit: ::std::time::Duration) -> Self {
            self.terms_mut().set_max_hold(limit);
            self
        }
    };
    (@ unfenced) => {
        /// Asks for no fence, which is a little cheaper: for work that writes to nothing that could check one.
        /// [`Guard::fence`](crate::Guard::fence) returns [`Fence::NONE`](crate::Fence::NONE) then.
        pub fn unfenced(mut self) -> Self {
            self.terms_mut().set_fenced(false);
            self
        }
    };
    (@ retry_every) => {
        /// Sets the pause between two polls, where a waiter has to poll. Without it the pause grows from the manager's
        /// [`poll_interval`](crate::Options::poll_interval) to its
        /// [`max_poll_interval`](crate::Options::max_poll_interval).
        pub fn retry_every(mut self, pause: ::std::time::Duration) -> Self {
            self.terms_mut().set_retry_every(pause);
            self
        }
    };
    (@ on_unavailable) => {
        /// Sets what happens when the store cannot be reached. Without it the manager's policy applies.
        pub fn on_unavailable(mut self, policy: $crate::OnUnavailable) -> Self {
            self.terms_mut().set_on_unavailable(policy);
            self
        }
    };
}
pub(crate) use setters;

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(terms: Terms) -> Result<Wish, Invalid> {
        terms.wish(LockName::new("a")?, &Options::default())
    }

    #[test]
    fn what_is_not_set_comes_from_the_manager() {
        let (options, wish) = (Options::default(), wish(Terms::new()).expect("valid"));
        assert_eq!((wish.ttl, wish.owner, wish.on_unavailable), (options.ttl, options.owner, options.on_unavailable));
        assert!(wish.fenced && wish.renew_every.is_some() && wish.wait == Wait::Forever);
    }

    #[test]
    fn terms_that_are_merged_override_only_what_they_set() {
        let second = Duration::from_secs(1);
        let mut terms = Terms::new().ttl(second * 5).no_wait().renew(false);
        terms.merge(&Terms::new().ttl(second * 7).unfenced());
        let merged = wish(terms.clone()).expect("valid");
        assert_eq!((merged.ttl.duration(), merged.wait, merged.renew_every), (second * 7, Wait::Not, None));
        assert!(!merged.fenced);
        terms.require_protection();
        assert!(wish(terms).expect("valid").fenced);
    }

    #[test]
    fn the_first_value_that_is_refused_is_the_error() {
        let terms = Terms::new().ttl(Duration::ZERO).owner("");
        assert!(matches!(wish(terms.clone()), Err(Invalid::Ttl { .. })));
        let mut later = Terms::new().owner("");
        later.merge(&terms);
        assert!(matches!(wish(later), Err(Invalid::Owner { .. })));
    }
}

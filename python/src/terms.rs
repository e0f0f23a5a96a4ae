//! The terms of a request, and times as Python gives them.

use std::ops::RangeInclusive;
use std::time::Duration;

use leasehold::OnUnavailable;
use leasehold::bindings::Retention;
use leasehold::lease::Ttl;
use pyo3::prelude::*;

use crate::failure::Failure;

/// The terms of a request: lease, waiting, renewal, owner.
#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Terms {
    /// Everything but the owner.
    terms: leasehold::lease::Terms,
    /// Kept as text, because each process adds its own process id.
    owner: Option<String>,
}

impl Terms {
    /// The terms, with this process in the owner.
    pub(crate) fn of_this_process(&self) -> leasehold::lease::Terms {
        let terms = self.terms.clone();
        match &self.owner {
            Some(owner) => terms.owner(owner),
            None => terms,
        }
    }
}

#[pymethods]
impl Terms {
    #[new]
    #[pyo3(signature = (*, ttl, wait, renew, max_hold, fenced, owner, on_unavailable))]
    fn new(
        ttl: Option<f64>,
        wait: Option<f64>,
        renew: bool,
        max_hold: Option<f64>,
        fenced: bool,
        owner: Option<String>,
        on_unavailable: Option<&str>,
    ) -> PyResult<Self> {
        let mut terms = leasehold::lease::Terms::new().renew(renew);
        if let Some(ttl) = ttl {
            terms = terms.ttl(self::ttl("ttl", ttl)?);
        }
        if let Some(wait) = wait {
            terms = terms.wait_up_to(duration("wait", wait)?);
        }
        if let Some(max_hold) = max_hold {
            terms = terms.max_hold(duration("max_hold", max_hold)?);
        }
        if !fenced {
            terms = terms.unfenced();
        }
        if let Some(policy) = on_unavailable {
            terms = terms.on_unavailable(self::policy(policy)?);
        }
        Ok(Self { terms, owner })
    }
}

/// Reads a number of seconds.
pub(crate) fn duration(what: &str, seconds: f64) -> Result<Duration, Failure> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) => Ok(duration),
        // Infinity, or more seconds than a `Duration` holds.
        Err(_) if seconds > 0.0 => Ok(Duration::MAX),
        Err(_) => Err(Failure::Argument(format!("{what}: {seconds} is not a number of seconds, 0 or more"))),
    }
}

/// Reads the ttl of a lease.
pub(crate) fn ttl(what: &str, seconds: f64) -> Result<Duration, Failure> {
    whole_millis(what, seconds, Ttl::MIN..=Ttl::MAX)
}

/// Reads for how long a result or a value is kept.
pub(crate) fn retention(what: &str, seconds: f64) -> Result<Duration, Failure> {
    whole_millis(what, seconds, Retention::MIN..=Retention::MAX)
}

/// Reads a time that stores count in whole milliseconds.
fn whole_millis(what: &str, seconds: f64, bounds: RangeInclusive<Duration>) -> Result<Duration, Failure> {
    let exact = duration(what, seconds)?.saturating_add(Duration::from_micros(500));
    let given = Duration::from_millis(u64::try_from(exact.as_millis()).unwrap_or(u64::MAX));
    if bounds.contains(&given) {
        return Ok(given);
    }
    let (least, most) = (bounds.start().as_secs_f64(), bounds.end().as_secs());
    Err(Failure::Argument(format!("{what}: {seconds:?} is not between {least} and {most} seconds")))
}

/// Reads what happens while the store cannot be reached.
pub(crate) fn policy(text: &str) -> Result<OnUnavailable, Failure> {
    match text {
        "closed" => Ok(OnUnavailable::FailClosed),
        "open" => Ok(OnUnavailable::FailOpen),
        _ => Err(Failure::Argument(format!("on_unavailable: {text:?} is neither \"closed\" nor \"open\""))),
    }
}

/// Raises `InvalidArgument` for a ttl that is out of bounds; the message names the argument `what`.
#[pyfunction]
pub(crate) fn check_ttl(what: &str, seconds: f64) -> PyResult<()> {
    Ok(ttl(what, seconds).map(drop)?)
}

/// Raises `InvalidArgument` for a retention that is out of bounds; the message names the argument `what`.
#[pyfunction]
pub(crate) fn check_retention(what: &str, seconds: f64) -> PyResult<()> {
    Ok(retention(what, seconds).map(drop)?)
}

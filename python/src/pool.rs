//! Any of several locks.

use leasehold::inspect::LockView;
use pyo3::prelude::*;

use crate::answer::Answer;
use crate::call::Call;
use crate::client::{Client, terms};

/// A call that takes any `count` members of a pool: their numbers and guards.
#[pyfunction]
#[pyo3(signature = (client, name, members, count, ttl, wait, renew, max_hold, owner))]
#[expect(clippy::too_many_arguments, reason = "Python gives them names")]
pub(crate) fn acquire_any(
    py: Python<'_>,
    client: &Client,
    name: String,
    members: Vec<u32>,
    count: usize,
    ttl: Option<f64>,
    wait: Option<f64>,
    renew: bool,
    max_hold: Option<f64>,
    owner: Option<String>,
) -> PyResult<Call> {
    let terms = terms(ttl, wait, renew, max_hold, owner).map_err(|failure| failure.raise(py))?;
    client.call(py, async move |locks| {
        let pool = locks.pool(name, members)?;
        let permits = pool.any(count).terms(&terms).await?;
        let permits = permits.into_iter().map(|permit| (permit.index(), permit.into_guard().into()));
        Ok(Answer::Permits(permits.collect()))
    })
}

/// A call that says who holds each member of a pool: pairs of its number and a view, in JSON.
#[pyfunction]
pub(crate) fn pool_status(py: Python<'_>, client: &Client, name: String, members: Vec<u32>) -> PyResult<Call> {
    client.call(py, async move |locks| {
        let members = locks.pool(name, members)?.status().await?;
        let views: Vec<(u32, LockView)> = members.iter().map(|member| (member.index, member.lock.view())).collect();
        Ok(Answer::json(&views))
    })
}

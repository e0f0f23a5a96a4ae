//! Pools: any of several locks.

use leasehold::inspect::LockView;
use pyo3::prelude::*;

use crate::call::Call;
use crate::client::Client;
use crate::guard::Held;
use crate::json;
use crate::terms::Terms;

/// Makes a call that acquires any `count` members of a pool and returns their numbers and guards.
#[pyfunction]
pub(crate) fn acquire_any(
    client: &Client,
    name: String,
    members: Vec<u32>,
    count: usize,
    terms: &Terms,
) -> PyResult<Call> {
    let terms = terms.of_this_process();
    client.call(async move |locks| {
        let pool = locks.pool(name, members)?;
        let permits = pool.any(count).terms(&terms).await?;
        let permits: Vec<(u32, Held)> =
            permits.into_iter().map(|permit| (permit.index(), permit.into_guard().into())).collect();
        Ok(permits)
    })
}

/// Makes a call that returns, in JSON, pairs of a member's number and a view of its lock.
#[pyfunction]
pub(crate) fn pool_status(client: &Client, name: String, members: Vec<u32>) -> PyResult<Call> {
    client.call(async move |locks| {
        let members = locks.pool(name, members)?.status().await?;
        let views: Vec<(u32, LockView)> = members.iter().map(|member| (member.index, member.lock.view())).collect();
        Ok(json(&views))
    })
}

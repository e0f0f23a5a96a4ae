//! One job per request, over real HTTP, on two instances of the service.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use jobs::{Dispatcher, Send};
use leasehold_testkit::{Arena, on_every_store};
use support::{ask, serve};

on_every_store!(a_request_becomes_one_job_however_often_it_comes, a_job_that_no_node_accepted_blocks_nothing);

fn sending(sent: &Arc<AtomicUsize>, failures: usize) -> Send {
    let sent = sent.clone();
    Arc::new(move |_| {
        let fails = sent.fetch_add(1, Ordering::SeqCst) < failures;
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            if fails { Err("the node is away".into()) } else { Ok(()) }
        })
    })
}

async fn a_request_becomes_one_job_however_often_it_comes(arena: Arena) {
    let sent = Arc::new(AtomicUsize::new(0));
    let instances = [
        serve(Dispatcher::new(arena.manager().await, sending(&sent, 0)).routes()).await,
        serve(Dispatcher::new(arena.manager().await, sending(&sent, 0)).routes()).await,
    ];
    let answers = join_all((0..64).map(|n| ask(instances[n % 2], "PUT /requests/r1", "", ""))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    assert_eq!(answers.iter().filter(|answer| answer.status == 200).count(), 63, "{answers:?}");
    let job = answers[0].json()["job_id"].clone();
    assert!(answers.iter().all(|answer| answer.json()["job_id"] == job), "{answers:?}");
    assert_eq!(sent.load(Ordering::SeqCst), 1, "one job was sent");
    let shown = ask(instances[1], "GET /requests/r1", "", "").await.json();
    assert_eq!((&shown["job_id"], &shown["dispatched"]), (&job, &true.into()));
    // Two nodes with two slots: the fifth request finds no slot until a job's lease has ended.
    let others = join_all(
        (2..=5).map(|n| async move { ask(instances[n % 2], &format!("PUT /requests/r{n}"), "", "").await.status }),
    );
    let mut others = others.await;
    others.sort_unstable();
    assert_eq!(others, [201, 201, 201, 503]);
}

async fn a_job_that_no_node_accepted_blocks_nothing(arena: Arena) {
    let sent = Arc::new(AtomicUsize::new(0));
    let at = serve(Dispatcher::new(arena.manager().await, sending(&sent, 6)).routes()).await;
    // More failures than slots: each frees its own.
    let mut failures = 0;
    let created = loop {
        let answer = ask(at, "PUT /requests/r1", "", "").await;
        match answer.status {
            502 => failures += 1,
            201 => break answer,
            // Freed in the background, a moment later.
            200 | 503 => tokio::time::sleep(Duration::from_millis(2)).await,
            other => panic!("{other}: {answer:?}"),
        }
    };
    assert_eq!((failures, created.json()["dispatched"].as_bool()), (6, Some(true)));
}

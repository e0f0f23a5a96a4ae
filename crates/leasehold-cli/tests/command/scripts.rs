//! `acquire`, `renew` and `release` in scripts.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Place, ran};

fn acquire(place: &Place, name: &str, ttl: &str) -> (String, u64) {
    let out = place.ok(&["acquire", name, "--ttl", ttl]);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 2, "token and fence: {out:?}");
    (lines[0].to_owned(), lines[1].parse().expect("a fence"))
}

#[tokio::test]
async fn a_script_acquires_renews_and_releases() {
    for place in Place::each().await {
        let (token, fence) = acquire(&place, "deploy", "10m");
        let held = place.run(&["acquire", "deploy", "--ttl", "5s"]);
        assert_eq!((held.code, held.out.as_str()), (75, ""), "{held:?}");
        assert!(held.err.starts_with("leasehold: deploy is held by "), "{held:?}");
        assert!(held.err.contains(&place.store) && held.err.contains("leasehold why deploy"), "{held:?}");

        assert_eq!(place.with_token(&token, &["renew", "deploy"]).code, 0);
        let view = place.json(&["why", "deploy"]);
        assert_eq!((&view["ttl_ms"], &view["fence"]), (&600_000.into(), &fence.into()), "its own ttl: {view}");
        assert_eq!(place.with_token(&token, &["renew", "deploy", "--ttl", "20m"]).code, 0);
        let view = place.json(&["why", "deploy"]);
        assert_eq!(view["ttl_ms"], 1_200_000, "the new ttl is the lease's own now: {view}");
        assert!(view["ttl_left_ms"].as_u64().expect("ms") > 1_100_000, "{view}");

        let stranger = place.with_token(&"z".repeat(32), &["release", "deploy"]);
        assert_eq!(stranger.code, 76, "{stranger:?}");
        assert_eq!(place.json(&["why", "deploy"])["held"], true, "nothing was touched");
        assert_eq!(place.with_token(&token, &["release", "deploy"]).code, 0);
        for verb in ["release", "renew"] {
            let late = place.with_token(&token, &[verb, "deploy"]);
            assert_eq!(late.code, 76, "{late:?}");
            assert!(late.err.contains("it is free") && !late.err.contains(&token), "{late:?}");
        }
        let (_, next) = acquire(&place, "deploy", "1m");
        assert!(next > fence, "fences rise");
    }
}

#[tokio::test]
async fn only_the_json_of_acquire_contains_the_token() {
    for place in Place::each().await {
        let taken = place.json(&["acquire", "a", "--ttl", "1m", "--owner", "deployer"]);
        let token = taken["token"].as_str().expect("a token").to_owned();
        assert_eq!((&taken["name"], &taken["held"], &taken["ttl_ms"]), (&"a".into(), &true.into(), &60_000.into()));
        assert!(taken["owner"].as_str().expect("an owner").starts_with("deployer@"), "{taken}");
        assert!(taken["fence"].as_u64().expect("a fence") > 0);
        let renewed = place.with_token(&token, &["renew", "a", "--json"]);
        for said in
            [place.ok(&["ls", "--json"]), place.ok(&["why", "a", "--json"]), place.ok(&["why", "a"]), renewed.out]
        {
            assert!(said.contains("deployer@") && !said.contains(&token), "{said}");
        }
        let released = place.with_token(&token, &["release", "a", "--json"]);
        assert_eq!(released.out, "{\"name\":\"a\",\"released\":true}\n");
    }
}

#[tokio::test]
async fn a_token_comes_from_a_file_or_a_pipe() {
    let place = Place::sqlite();
    let file = place.home.path().join("token");
    for name in ["by-file", "by-pipe"] {
        let out = place.ok(&["acquire", name, "--ttl", "1m"]);
        fs::write(&file, out).expect("written");
        let mut command = place.command(&["release", name, "--token-file", "-"]);
        command.stdin(fs::File::open(&file).expect("a file"));
        let by_pipe = name == "by-pipe";
        let ran = if by_pipe {
            ran(command)
        } else {
            place.run(&["release", name, "--token-file", file.to_str().expect("text")])
        };
        assert_eq!(ran.code, 0, "{name}: {ran:?}");
    }
}

#[tokio::test]
async fn acquire_waits_for_at_most_the_given_time() {
    for place in Place::each().await {
        let locks = place.manager().await;
        let guard = locks.lock("busy").await.expect("ours");
        let began = Instant::now();
        let late = place.run(&["acquire", "busy", "--ttl", "5s", "--wait", "300ms"]);
        assert_eq!(late.code, 75, "{late:?}");
        assert!(began.elapsed() >= Duration::from_millis(300), "it gave up early");
        let mut waiter = place.command(&["acquire", "busy", "--ttl", "5s", "--wait", "20s"]);
        let waiter = waiter.stdout(Stdio::piped()).spawn().expect("it starts");
        // Still held at the first attempt.
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(guard.release().await.expect("answered"));
        let waiting = waiter.wait_with_output().expect("it ends");
        assert!(waiting.status.success(), "{waiting:?}");
        assert_eq!(waiting.stdout.iter().filter(|byte| **byte == b'\n').count(), 2, "token and fence");
    }
}

#[tokio::test]
async fn an_interrupted_acquire_leaves_the_queue_and_dies_of_the_signal() {
    for place in Place::each().await {
        let locks = place.manager().await;
        let guard = locks.lock("busy").await.expect("ours");
        for signal in [Signal::INT, Signal::TERM] {
            let mut waiter = place.command(&["acquire", "busy", "--ttl", "1m", "--wait", "20s"]);
            let mut waiter = waiter.stdout(Stdio::null()).spawn().expect("it starts");
            while locks.info("busy").await.expect("answered").waiters.is_empty() {
                assert!(waiter.try_wait().expect("it runs").is_none(), "it does not wait");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            kill_process(Pid::from_child(&waiter), signal).expect("it lives");
            assert_eq!(waiter.wait().expect("it ends").signal(), Some(signal.as_raw()));
            assert!(locks.info("busy").await.expect("answered").waiters.is_empty(), "nobody waits any more");
        }
        assert!(guard.release().await.expect("answered"));
    }
}

#[tokio::test]
async fn an_acquired_lease_outlives_the_command_and_expires() {
    for place in Place::each().await {
        acquire(&place, "short", "700ms");
        assert_eq!(place.json(&["why", "short"])["held"], true, "the command is gone, the lease is not");
        assert!(place.ok(&["why", "short"]).contains("not tied to a process"));
        let began = Instant::now();
        place.ok(&["acquire", "short", "--ttl", "1s", "--wait", "10s"]);
        assert!(began.elapsed() < Duration::from_secs(5), "the ttl did not end it");
    }
}

#[tokio::test]
async fn namespaces_and_stores_are_separate() {
    let place = Place::redis().await;
    acquire(&place, "a", "1m");
    assert_eq!(place.run(&["acquire", "a", "--ttl", "1m", "--namespace", "other"]).code, 0);
    assert_eq!(place.run(&["acquire", "a", "--ttl", "1m", "--namespace", "other"]).code, 75);
    assert_eq!(place.run(&["acquire", "a", "--ttl", "1m", "--namespace", ""]).code, 0);
}

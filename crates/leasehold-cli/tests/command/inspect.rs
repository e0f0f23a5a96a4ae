//! `ls` and `why`: who holds what, and who waits.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::{Place, ran};
use serde_json::json;

const FIELDS: [&str; 14] = [
    "name",
    "held",
    "owner",
    "holder_id",
    "fence",
    "since_ms",
    "held_ms",
    "ttl_ms",
    "ttl_left_ms",
    "last_seen_ms",
    "connected",
    "revoked",
    "foreign",
    "waiters",
];

#[tokio::test(flavor = "multi_thread")]
async fn why_shows_the_holder_and_the_queue() {
    for place in Place::each().await {
        let free = place.json(&["why", "gpu_lock:0"]);
        assert_eq!((&free["held"], &free["owner"], &free["waiters"]), (&json!(false), &json!(null), &json!([])));

        let (holder, first, second) = (place.manager().await, place.manager().await, place.manager().await);
        let guard = holder.lock("gpu_lock:0").owner("tts").ttl(Duration::from_secs(30)).await.expect("ours");
        let mut waiting = Vec::new();
        for (n, (locks, owner)) in [(&first, "ocr"), (&second, "whisper")].into_iter().enumerate() {
            let request = locks.lock("gpu_lock:0").owner(owner);
            waiting.push(tokio::spawn(async move { request.await.map(drop) }));
            while holder.info("gpu_lock:0").await.expect("answered").waiters.len() <= n {
                tokio::task::yield_now().await;
            }
        }
        // On Redis the fence is written half a second after the grant.
        let fence = async || holder.holder("gpu_lock:0").await.expect("answered").expect("held").fence;
        while fence().await.is_none() {
            tokio::task::yield_now().await;
        }
        let view = place.json(&["why", "gpu_lock:0"]);
        assert_eq!(view.as_object().expect("an object").len(), FIELDS.len(), "{view}");
        FIELDS.iter().for_each(|field| assert!(view.get(field).is_some(), "{field} is missing in {view}"));
        assert_eq!((&view["held"], &view["connected"], &view["ttl_ms"]), (&json!(true), &json!(true), &json!(30_000)));
        assert_eq!(view["holder_id"], guard.holder_id().to_string());
        assert_eq!(view["fence"], guard.fence().get(), "{view}");
        let owner = |n: usize| view["waiters"][n]["owner"].as_str().expect("an owner").to_owned();
        assert!(owner(0).starts_with("ocr@") && owner(1).starts_with("whisper@"), "{view}");

        let said = place.ok(&["why", "gpu_lock:0"]);
        let lines: Vec<&str> = said.lines().collect();
        assert!(lines[0].starts_with("gpu_lock:0 ") && lines[0].contains("held"), "{said}");
        assert!(lines[0].ends_with(&holder.store()), "which store: {said}");
        assert!(said.contains("tts@") && said.contains(", connected"), "{said}");
        assert!(said.contains("1. ocr@") && said.contains("2. whisper@"), "{said}");
        let listed = place.json(&["ls"]);
        assert_eq!(listed[0]["waiters"].as_array().expect("a list").len(), 2, "{listed}");

        assert!(guard.release().await.expect("answered"));
        for waiter in waiting {
            waiter.await.expect("no panic").expect("served");
        }
    }
}

#[tokio::test]
async fn ls_lists_every_page_by_name() {
    for place in Place::each().await {
        assert_eq!(place.json(&["ls"]), json!([]));
        let empty = place.run(&["ls"]);
        assert!(empty.out.is_empty() && empty.err.contains("no lock is held in"), "{empty:?}");
        let locks = place.manager().await;
        let mut guards = Vec::new();
        for n in 0..1_100 {
            guards.push(locks.lock(format!("job:{n:04}")).await.expect("ours"));
        }
        guards.push(locks.lock("other").await.expect("ours"));
        let names = |listed: &serde_json::Value| -> Vec<String> {
            listed.as_array().expect("a list").iter().map(|v| v["name"].as_str().expect("a name").to_owned()).collect()
        };
        let all = names(&place.json(&["ls"]));
        assert_eq!(all.len(), 1_101);
        assert!(all.is_sorted());
        assert_eq!(names(&place.json(&["ls", "job:000"])).len(), 10);
        let table = place.ok(&["ls", "other"]);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[0].split_whitespace().collect::<Vec<_>>(),
            ["NAME", "HOLDER", "HELD", "LEASE", "SEEN", "WAITING"]
        );
        assert!(lines.len() == 2 && lines[1].starts_with("other "), "{table}");
        drop(guards);
        locks.shutdown().await;
    }
}

#[tokio::test]
async fn a_dead_holder_on_redis_is_shown_as_not_connected() {
    let place = Place::redis().await;
    let server = place.server.as_ref().expect("a server");
    let token = "T".repeat(32);
    // The lock of a killed process: its inbox has no subscriber.
    let value = format!("lh1 0 {token} 1700000000000000 lh1:inbox:gone 1700000000000 30000 dead@host:7");
    server.command(&["SET", "leasehold:lock:a", &value, "PX", "20000"]).await;
    let view = place.json(&["why", "a"]);
    assert_eq!((&view["connected"], &view["held"]), (&json!(false), &json!(true)));
    assert!(place.ok(&["why", "a"]).contains("not connected"));
    assert_eq!(place.json(&["ls"])[0]["connected"], false);
    let ago = view["last_seen_ms"].as_u64().expect("ms");
    let now = view["since_ms"].as_u64().expect("ms") + view["held_ms"].as_u64().expect("ms");
    assert!((9_000..12_000).contains(&(now - ago)), "10 s of its 30 are gone: {view}");
}

#[tokio::test]
async fn foreign_holders_are_marked_and_escaped() {
    let place = Place::redis().await;
    let server = place.server.as_ref().expect("a server");
    server.command(&["SET", "gpu_lock:1", "evil\u{202e}\u{1b}[2J"]).await;
    let view = place.json(&["why", "gpu_lock:1"]);
    for unknown in ["fence", "since_ms", "held_ms", "ttl_ms", "ttl_left_ms", "last_seen_ms", "connected"] {
        assert!(view[unknown].is_null(), "{unknown}: {view}");
    }
    assert_eq!(view["foreign"], true);
    for (args, end) in [(&["why", "gpu_lock:1"][..], "does not expire"), (&["ls"], "no end")] {
        let said = place.ok(args);
        assert!(said.contains("evil\\u{202e}") && said.contains(end), "{said}");
        assert!(!said.contains(['\u{1b}', '\u{202e}']), "{said:?}");
    }
}

#[tokio::test]
async fn watch_repeats_until_its_reader_closes_the_pipe() {
    let place = Place::sqlite();
    place.ok(&["acquire", "a", "--ttl", "1m"]);
    let mut watch = place.command(&["ls", "--watch", "--json"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(watch.stdout.take().expect("a pipe")).lines();
    for _ in 0..2 {
        let line = lines.next().expect("goes on").expect("text");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&line).expect("JSON")[0]["name"], "a");
    }
    drop(lines);
    assert_eq!(watch.wait().expect("it ends").code(), Some(0), "a closed pipe is no error");
}

/// Ages come from the store's clock, so an observer with a wrong clock sees the right ones.
#[tokio::test(flavor = "multi_thread")]
async fn an_observer_with_a_wrong_clock_sees_the_right_ages() {
    if Command::new("faketime").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        println!("skipped: faketime is not installed");
        return;
    }
    let place = Place::redis().await;
    place.ok(&["acquire", "deploy", "--ttl", "1m"]);
    for ahead in ["+2h", "-2h"] {
        let ls = place.command(&["ls", "--json"]);
        let mut command = Command::new("faketime");
        command.args(["-f", ahead]).arg(ls.get_program()).args(ls.get_args());
        command.env("LEASEHOLD_STORE", &place.store).env("HOME", place.home.path());
        let listed: serde_json::Value = serde_json::from_str(&ran(command).out).expect("JSON");
        let held_ms = listed[0]["held_ms"].as_u64().expect("an age");
        assert!(held_ms < 60_000, "{ahead}: held for {held_ms} ms");
        let (since_ms, seen_ms) = (listed[0]["since_ms"].as_u64(), listed[0]["last_seen_ms"].as_u64());
        assert!(since_ms.expect("since") <= seen_ms.expect("seen") + 5, "{ahead}: {listed}");
    }
}

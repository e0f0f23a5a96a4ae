//! `rediss://`: the Redis store over TLS, against a real server. A server that cannot prove that it is the host in the
//! URL receives neither the password nor a request.

use std::sync::Arc;
use std::time::Duration;

use leasehold::bindings::{ClaimId, Retention};
use leasehold::store::redis::{RedisOptions, RedisStore};
use leasehold::store::{Bind, BindingId, BindingKind, Create, KeySpace, NewBinding, StoreErrorKind};
use leasehold::{Error, LockManager, LockName};
use leasehold_testkit::certificates::CertificateFiles;
use leasehold_testkit::server::free_port;
use leasehold_testkit::{Authority, RedisServer};

const SECRET: &str = "hunter2-canary";
const LONG: Duration = Duration::from_secs(20);

/// A server with a password, a plain port and a TLS port.
async fn server(files: &CertificateFiles) -> (RedisServer, u16) {
    let port = free_port();
    let path = |path: &std::path::Path| path.to_str().expect("text").to_owned();
    let (tls_port, certificate, key) = (port.to_string(), path(&files.certificate), path(&files.key));
    let server = RedisServer::with(&[
        "--tls-port",
        &tls_port,
        "--tls-cert-file",
        &certificate,
        "--tls-key-file",
        &key,
        "--tls-auth-clients",
        "no",
    ])
    .await;
    server.command(&["CONFIG", "SET", "requirepass", SECRET]).await;
    (server, port)
}

fn url(host: &str, port: u16, trusted: &Authority) -> String {
    format!("rediss://:{SECRET}@{host}:{port}?ca={}", trusted.file().display())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_are_handed_over_and_found_again_after_a_cut() {
    let authority = Authority::new();
    let (server, port) = server(&authority.certify("127.0.0.1")).await;
    let url = url("127.0.0.1", port, &authority);
    let (a, b) =
        (LockManager::connect(&url).await.expect("trusted"), LockManager::connect(&url).await.expect("trusted"));
    assert_eq!(a.store(), format!("rediss://127.0.0.1:{port}"));
    let held = a.lock("a").await.expect("free");
    let waiting = tokio::spawn({
        let b = b.clone();
        async move { b.lock("a").await }
    });
    while b.info("a").await.expect("answered").waiters.is_empty() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let fence = held.fence();
    assert!(held.release().await.expect("answered"));
    let guard = tokio::time::timeout(LONG, waiting).await.expect("in time").expect("no panic").expect("handed over");
    assert!(guard.fence() > fence);

    // Every connection except the one that sends this is cut. The lease survives.
    let cut = server_reply(&server, &["CLIENT", "KILL", "USER", "default", "SKIPME", "yes"]).await;
    assert_eq!(cut, redis::Value::Int(2), "each had one connection");
    // A request that was in flight when the connection was cut fails.
    let found = async {
        loop {
            if let Ok(holder) = a.holder("a").await {
                return holder;
            }
        }
    };
    let holder = tokio::time::timeout(LONG, found).await.expect("connected again");
    assert_eq!(holder.expect("held").id, guard.holder_id());
    assert!(guard.release().await.expect("found again"));
    for manager in [a, b] {
        manager.shutdown().await;
    }
}

/// The bytes are more than what the sockets hold: the client waits until it can write again. They are few enough for the
/// test that measures the memory of this process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_and_replies_of_megabytes_arrive_whole_and_in_order() {
    const BYTES: usize = 400_000;
    const REQUESTS: u8 = 12;
    let authority = Authority::new();
    let (server, port) = server(&authority.certify("127.0.0.1")).await;
    let options = RedisOptions::default().response_timeout(LONG);
    let store = RedisStore::connect(&url("127.0.0.1", port, &authority), KeySpace::default(), options).await;
    let store = Arc::new(store.expect("trusted"));
    let id = |i: u8| BindingId { kind: BindingKind::Bindings, id: LockName::new(format!("{i}")).expect("a name") };
    let value = |i: u8| vec![b'a' + i % 26; BYTES - usize::from(i)];
    let keep = Retention::new(LONG).expect("allowed");

    server.pause();
    let creating: Vec<_> = (0..REQUESTS)
        .map(|i| {
            let new = NewBinding { id: id(i), claim: ClaimId::random(), keep, slot: None, value: value(i) };
            let store = store.clone();
            tokio::spawn(async move { store.create(&new).await })
        })
        .collect();
    // No reply shows that the buffers are full. If they are not yet, the test checks less, and still passes.
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.resume();
    for created in creating {
        assert_eq!(created.await.expect("no panic").expect("answered"), Create::Created);
    }
    let reading: Vec<_> = (0..REQUESTS)
        .map(|i| {
            let store = store.clone();
            tokio::spawn(async move { store.read(&id(i)).await })
        })
        .collect();
    for (i, read) in (0..).zip(reading) {
        let (bound, _) = read.await.expect("no panic").expect("answered").expect("created before");
        assert!(bound.value == value(i), "the value of {i}");
    }
}

/// Sends a command on the plain port, where the server requires its password as well.
async fn server_reply(server: &RedisServer, parts: &[&str]) -> redis::Value {
    let mut client = redis::Client::open(server.url().replace("redis://", &format!("redis://:{SECRET}@")))
        .expect("a URL")
        .get_multiplexed_async_connection()
        .await
        .expect("logged in");
    let mut command = redis::cmd(parts[0]);
    command.arg(&parts[1..]);
    command.query_async(&mut client).await.expect("answered")
}

#[tokio::test]
async fn a_server_that_is_not_the_host_in_the_url_receives_nothing() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let (good, good_port) = server(&authority.certify("127.0.0.1")).await;
    let (_expired, expired_port) = server(&authority.certify_expired("127.0.0.1")).await;
    let (_elsewhere, elsewhere_port) = server(&authority.certify("redis.elsewhere")).await;
    let cases = [
        ("another authority", url("127.0.0.1", good_port, &stranger)),
        ("the machine's authorities", format!("rediss://:{SECRET}@127.0.0.1:{good_port}")),
        ("expired", url("127.0.0.1", expired_port, &authority)),
        ("another host", url("127.0.0.1", elsewhere_port, &authority)),
        ("plain text", url("127.0.0.1", good.port(), &authority)),
        ("no such file", format!("rediss://:{SECRET}@127.0.0.1:{good_port}?ca=no-such.pem")),
    ];
    for (what, url) in cases {
        let Err(Error::Connect { store, source }) = LockManager::connect(&url).await else {
            panic!("{what}: connected")
        };
        let said = format!("{store} {source} {source:?}");
        assert!(!said.contains(SECRET), "{what}: {said}");
        assert!(matches!(source.kind(), StoreErrorKind::Refused | StoreErrorKind::Unreachable), "{what}: {said}");
        assert!(
            said.contains("the TLS handshake failed")
                || said.contains("use TLS on this port")
                || said.contains("no-such.pem")
                || said.contains("no CA certificates"),
            "{what}: {said}"
        );
    }
    assert_eq!(server_reply(&good, &["ACL", "LOG"]).await, redis::Value::Array(Vec::new()), "a login was attempted");
}

#[tokio::test]
async fn plain_text_to_a_tls_port_is_an_error() {
    let authority = Authority::new();
    let (_server, port) = server(&authority.certify("127.0.0.1")).await;
    let error = LockManager::connect(&format!("redis://:{SECRET}@127.0.0.1:{port}")).await.expect_err("not plain");
    assert!(matches!(&error, Error::Connect { .. }) && !format!("{error:?}").contains(SECRET), "{error:?}");
}

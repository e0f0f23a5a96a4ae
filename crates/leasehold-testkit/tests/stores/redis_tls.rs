//! `rediss://`: Redis over TLS, with a real server. A server that cannot prove to be the host of the URL gets neither a password
//! nor a request.

use std::time::Duration;

use leasehold::store::StoreErrorKind;
use leasehold::{Error, LockManager};
use leasehold_testkit::certificates::CertificateFiles;
use leasehold_testkit::server::free_port;
use leasehold_testkit::{Authority, RedisServer};

const SECRET: &str = "hunter2-canary";
const LONG: Duration = Duration::from_secs(20);

/// A server with a password that uses TLS on a second port.
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
    let guard = tokio::time::timeout(LONG, waiting).await.expect("told").expect("no panic").expect("handed over");
    assert!(guard.fence() > fence);

    // Every connection except the one with this command is cut; the lease survives.
    let cut = server_says(&server, &["CLIENT", "KILL", "USER", "default", "SKIPME", "yes"]).await;
    assert_eq!(cut, redis::Value::Int(2), "both were connected once");
    // A request that was in flight when the connection was cut gets no reply.
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

/// The server requires its password on the plain port too.
async fn server_says(server: &RedisServer, parts: &[&str]) -> redis::Value {
    let mut client = redis::Client::open(server.url().replace("redis://", &format!("redis://:{SECRET}@")))
        .expect("a URL")
        .get_multiplexed_async_connection()
        .await
        .expect("let in");
    let mut command = redis::cmd(parts[0]);
    command.arg(&parts[1..]);
    command.query_async(&mut client).await.expect("answered")
}

#[tokio::test]
async fn whoever_is_not_the_host_in_the_url_is_not_spoken_to() {
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
            panic!("{what}: believed")
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
    assert_eq!(server_says(&good, &["ACL", "LOG"]).await, redis::Value::Array(Vec::new()), "nobody tried to log in");
}

#[tokio::test]
async fn plain_text_to_a_port_that_wants_tls_is_an_error() {
    let authority = Authority::new();
    let (_server, port) = server(&authority.certify("127.0.0.1")).await;
    let error = LockManager::connect(&format!("redis://:{SECRET}@127.0.0.1:{port}")).await.expect_err("not plain");
    assert!(matches!(&error, Error::Connect { .. }) && !format!("{error:?}").contains(SECRET), "{error:?}");
}

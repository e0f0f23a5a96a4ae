//! HTTPS with certificate files, and clients that speak another protocol.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use leasehold::LockManager;
use leasehold_server::{ServeError, Server, Settings, TlsFiles};
use leasehold_testkit::certificates::{Authority, CertificateFiles};
use leasehold_testkit::http::ask;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::settings;
use crate::support::Place;

/// A certificate for `localhost`.
fn issue(authority: &Authority) -> TlsFiles {
    let CertificateFiles { certificate, key } = authority.certify("localhost");
    TlsFiles { cert: certificate, key }
}

/// Replaces the content of the served files.
fn replace(files: &TlsFiles, by: &TlsFiles) {
    for (to, from) in [(&files.key, &by.key), (&files.cert, &by.cert)] {
        std::fs::copy(from, to).expect("copied");
    }
}

fn client(authority: &Authority) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority.file()).expect("a certificate")).expect("usable");
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().expect("known");
    TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
}

/// The status of a response over TLS, or why there was none.
async fn get(authority: &Authority, place: &Place, path: &str) -> Result<String, String> {
    let tcp = TcpStream::connect(place.at).await.expect("listening");
    let name = ServerName::try_from("localhost").expect("a name");
    let mut stream = client(authority).connect(name, tcp).await.map_err(|error| error.to_string())?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.map_err(|error| error.to_string())?;
    Ok(text.split("\r\n").next().unwrap_or("").to_owned())
}

fn served_with(files: &TlsFiles) -> Settings {
    let mut settings = Settings::default();
    settings.tls = Some(files.clone());
    settings
}

#[tokio::test(flavor = "multi_thread")]
async fn https_is_served_and_a_replaced_certificate_is_used_at_once() {
    let (authority, other) = (Authority::new(), Authority::new());
    let files = issue(&authority);
    let place = Place::memory_with(served_with(&files)).await;
    assert_eq!(get(&authority, &place, "/api/v1/locks").await.as_deref(), Ok("HTTP/1.1 200 OK"));
    assert!(get(&other, &place, "/healthz").await.is_err(), "of another authority");

    // A plain HTTP client learns that this server speaks TLS.
    let response = ask(place.at, "GET /healthz", &format!("Host: {}\r\n", place.at), "").await;
    assert_eq!(response.code(), (400, "needs_tls".into()));
    assert!(response.head.contains(&format!("content-length: {}", response.body.len())), "{response:?}");

    // A certificate that cannot be used leaves the old one in use.
    std::fs::write(&files.cert, "nonsense").expect("written");
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    assert_eq!(get(&authority, &place, "/healthz").await.as_deref(), Ok("HTTP/1.1 200 OK"));
    replace(&files, &issue(&other));
    let renewed = async {
        while get(&other, &place, "/healthz").await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), renewed).await.expect("the new certificate");
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_to_a_plain_server_fails_at_once() {
    let (place, nobody) = (Place::memory().await, Authority::new());
    let failed = tokio::time::timeout(Duration::from_secs(5), get(&nobody, &place, "/healthz")).await;
    let error = failed.expect("at once").expect_err("no TLS here");
    assert!(error.to_lowercase().contains("version"), "{error}");
    assert_eq!(place.get("/healthz").await.status, 200, "others are served");
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_certificate_files_are_rejected_by_name() {
    let (authority, another) = (Authority::new(), Authority::new());
    let (files, other) = (issue(&authority), issue(&another));
    let missing = authority.file().with_file_name("missing.pem");
    let table = [
        (TlsFiles { cert: missing.clone(), ..files.clone() }, "missing.pem cannot be read"),
        (TlsFiles { key: missing, ..files.clone() }, "missing.pem cannot be read"),
        (TlsFiles { cert: files.key.clone(), ..files.clone() }, "localhost.key has no certificate"),
        (TlsFiles { key: files.cert.clone(), ..files.clone() }, "localhost.pem has no private key"),
        (TlsFiles { key: other.key, ..files.clone() }, "they do not match"),
    ];
    for (files, text) in table {
        let locks = LockManager::connect("memory:").await.expect("a store");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let checked = Server::new(locks.clone(), served_with(&files)).may_listen_on(address).expect_err(text);
        let refused = Server::new(locks, served_with(&files)).run(listener, async {}).await.expect_err(text);
        for error in [checked, refused] {
            assert!(matches!(error, ServeError::Tls(_)) && error.to_string().contains(text), "{error}");
            // The cause is the source; the alternate form appends it, once.
            if let Some(cause) = error.source() {
                assert_eq!(format!("{error:#}"), format!("{error}: {cause}"));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn https_webhooks_are_verified_against_the_configured_ca() {
    let (authority, another) = (Authority::new(), Authority::new());
    let files = issue(&authority);
    let certs = CertificateDer::pem_file_iter(&files.cert).expect("read");
    let certs = certs.collect::<Result<Vec<_>, _>>().expect("certificates");
    let key = PrivateKeyDer::from_pem_file(&files.key).expect("a key");
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config =
        tokio_rustls::rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("known").with_no_client_auth().with_single_cert(certs, key).expect("they fit");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let receiving = tokio::spawn(async move {
        loop {
            let (tcp, _) = listener.accept().await.expect("accepted");
            let Ok(mut stream) = acceptor.accept(tcp).await else { continue };
            let mut text = Vec::new();
            while !text.ends_with(b"}") && stream.read_buf(&mut text).await.is_ok_and(|n| n > 0) {}
            let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await;
            let _ = stream.shutdown().await;
        }
    });
    for (trusted, outcome) in [(&authority, "sent"), (&another, "failed")] {
        let home = tempfile::tempdir().expect("a directory");
        let yaml = format!(
            "alerts:\n  webhook:\n    url: https://localhost:{port}/\n    allow_private: true\n    retries: 0\n    ca: {}\n",
            trusted.file().display()
        );
        let place = Place::memory_with_journal(super::webhook::journal(home.path()), settings(&yaml)).await;
        super::webhook::counted(&place, &format!("{{sink=\"webhook\",outcome=\"{outcome}\"}} 1\n")).await;
        place.end().await;
    }
    receiving.abort();
}

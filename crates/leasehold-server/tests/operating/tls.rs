//! HTTPS by certificate files, and what happens to those who speak something else.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use leasehold::LockManager;
use leasehold_server::{ServeError, Server, Settings, TlsFiles};
use leasehold_testkit::http::ask;
use rcgen::{CertificateParams, CertifiedIssuer, Issuer, KeyPair};
use rustls::pki_types::ServerName;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::settings;
use crate::support::Place;

/// An authority of the test's own.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        Self { issuer: CertifiedIssuer::self_signed(params, key).expect("signed") }
    }

    pub(crate) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Writes a certificate for `localhost` and its key.
    pub(crate) fn issue(&self, dir: &Path) -> TlsFiles {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        let issuer: &Issuer<'_, KeyPair> = &self.issuer;
        let cert = params.signed_by(&key, issuer).expect("signed");
        let files = TlsFiles { cert: dir.join("cert.pem"), key: dir.join("key.pem") };
        std::fs::write(&files.cert, cert.pem()).expect("written");
        std::fs::write(&files.key, key.serialize_pem()).expect("written");
        files
    }

    fn client(&self) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).expect("a certificate");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().expect("known");
        TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
    }

    /// The status of an answer over TLS, or why there was none.
    async fn get(&self, place: &Place, path: &str) -> Result<String, String> {
        let tcp = TcpStream::connect(place.at).await.expect("listening");
        let name = ServerName::try_from("localhost").expect("a name");
        let mut stream = self.client().connect(name, tcp).await.map_err(|error| error.to_string())?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await.map_err(|error| error.to_string())?;
        Ok(text.split("\r\n").next().unwrap_or("").to_owned())
    }
}

fn served_with(files: &TlsFiles) -> Settings {
    let mut settings = Settings::default();
    settings.tls = Some(files.clone());
    settings
}

#[tokio::test(flavor = "multi_thread")]
async fn https_is_served_and_a_new_certificate_counts_at_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let (authority, other) = (Authority::new(), Authority::new());
    let files = authority.issue(dir.path());
    let place = Place::memory_with(served_with(&files)).await;
    assert_eq!(authority.get(&place, "/api/v1/locks").await.as_deref(), Ok("HTTP/1.1 200 OK"));
    assert!(other.get(&place, "/healthz").await.is_err(), "of another authority");

    // Plain HTTP is told what is spoken here.
    let told = ask(place.at, "GET /healthz", &format!("Host: {}\r\n", place.at), "").await;
    assert_eq!(told.code(), (400, "needs_tls".into()));
    assert!(told.head.contains(&format!("content-length: {}", told.body.len())), "{told:?}");

    // One that cannot be used leaves the old one in force.
    std::fs::write(&files.cert, "nonsense").expect("written");
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    assert_eq!(authority.get(&place, "/healthz").await.as_deref(), Ok("HTTP/1.1 200 OK"));
    other.issue(dir.path());
    let renewed = async {
        while other.get(&place, "/healthz").await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), renewed).await.expect("the new certificate");
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_to_a_plain_server_fails_at_once() {
    let place = Place::memory().await;
    let failed = tokio::time::timeout(Duration::from_secs(5), Authority::new().get(&place, "/healthz")).await;
    let error = failed.expect("at once").expect_err("no TLS here");
    assert!(error.to_lowercase().contains("version"), "{error}");
    assert_eq!(place.get("/healthz").await.status, 200, "others are served");
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_make_no_certificate_are_refused_with_their_name() {
    let (dir, others) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let files = Authority::new().issue(dir.path());
    let other = Authority::new().issue(others.path());
    let missing = dir.path().join("missing.pem");
    let table = [
        (TlsFiles { cert: missing.clone(), ..files.clone() }, "missing.pem cannot be read"),
        (TlsFiles { key: missing, ..files.clone() }, "missing.pem cannot be read"),
        (TlsFiles { cert: files.key.clone(), ..files.clone() }, "key.pem has no certificate"),
        (TlsFiles { key: files.cert.clone(), ..files.clone() }, "cert.pem has no private key"),
        (TlsFiles { key: other.key, ..files.clone() }, "the key is not the certificate's"),
    ];
    for (files, text) in table {
        let locks = LockManager::connect("memory:").await.expect("a store");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let checked = Server::new(locks.clone(), served_with(&files)).check(address).expect_err(text);
        let refused = Server::new(locks, served_with(&files)).run(listener, async {}).await.expect_err(text);
        for error in [checked, refused] {
            assert!(matches!(error, ServeError::Tls(_)) && error.to_string().contains(text), "{error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_https_webhook_is_trusted_by_its_authority_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let authority = Authority::new();
    let files = authority.issue(dir.path());
    let certs = rustls::pki_types::CertificateDer::pem_file_iter(&files.cert).expect("read");
    let certs = certs.collect::<Result<Vec<_>, _>>().expect("certificates");
    let key = rustls::pki_types::PrivateKeyDer::from_pem_file(&files.key).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
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
    for (trusted, outcome) in [(authority.pem(), "sent"), (Authority::new().pem(), "failed")] {
        let home = tempfile::tempdir().expect("a directory");
        let ca = home.path().join("ca.pem");
        std::fs::write(&ca, trusted).expect("written");
        let yaml = format!(
            "alerts:\n  webhook:\n    url: https://localhost:{port}/\n    allow_private: true\n    retries: 0\n    ca: {}\n",
            ca.display()
        );
        let place = Place::memory_with_journal(crate::webhook::journal(home.path()), settings(&yaml)).await;
        let wanted = format!("{{sink=\"webhook\",outcome=\"{outcome}\"}} 1\n");
        let told = async {
            while !place.get("/metrics").await.body.contains(&wanted) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), told).await.unwrap_or_else(|_| panic!("never {outcome}"));
        place.end().await;
    }
    receiving.abort();
}

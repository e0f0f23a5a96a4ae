//! TLS: by certificate files, which may be replaced while the server runs, and the authorities that webhooks are
//! trusted by.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use crate::config::TlsFiles;

/// How soon a certificate that was replaced counts.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Why there can be no TLS.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file has no certificate in it.
    #[error("{} has no certificate in PEM (-----BEGIN CERTIFICATE-----)", path.display())]
    NoCertificate {
        /// Which.
        path: PathBuf,
    },
    /// A file has no key in it.
    #[error("{} has no private key in PEM (-----BEGIN PRIVATE KEY-----, without a password)", path.display())]
    NoKey {
        /// Which.
        path: PathBuf,
    },
    /// They do not belong together, or cannot be used.
    #[error("the certificate {} and the key {} cannot be used: {problem}", cert.display(), key.display())]
    Unusable {
        /// The certificate.
        cert: PathBuf,
        /// The key.
        key: PathBuf,
        /// What is wrong with them.
        problem: String,
    },
    /// Nobody is trusted.
    #[error(
        "this machine trusts no certificate authority, so no https webhook can be used: install ca-certificates, or set alerts.webhook.ca"
    )]
    NoRoots,
}

/// What is agreed upon in a handshake.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(tokio_rustls::rustls::crypto::ring::default_provider())
}

/// The authorities to trust: those of a file, or the machine's own. Whoever runs the machine decides whom it trusts,
/// and its updates reach us without one of ours.
pub(crate) fn roots(file: Option<&Path>) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    match file {
        Some(path) => {
            for cert in certificates(path)? {
                roots.add(cert).map_err(|_| TlsError::NoCertificate { path: path.to_owned() })?;
            }
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            for error in found.errors {
                tracing::warn!(%error, "a certificate authority of this machine cannot be read");
            }
            roots.add_parsable_certificates(found.certs);
        }
    }
    if roots.is_empty() { Err(TlsError::NoRoots) } else { Ok(roots) }
}

/// A certificate that is read again when its files change.
pub(crate) struct Tls {
    files: TlsFiles,
    loaded: Mutex<Loaded>,
}

struct Loaded {
    acceptor: TlsAcceptor,
    /// Of the files when they were last read, whether they could be used or not.
    stamps: [Option<Stamp>; 2],
    looked: Instant,
}

/// Tells one content of a file from another: inode, length, and when it was written.
type Stamp = (u64, u64, i64, i64);

impl Tls {
    pub(crate) fn open(files: &TlsFiles) -> Result<Self, TlsError> {
        let stamps = stamps(files);
        let loaded = Loaded { acceptor: acceptor(files)?, stamps, looked: Instant::now() };
        Ok(Self { files: files.clone(), loaded: Mutex::new(loaded) })
    }

    /// For a new connection. A certificate that was replaced by one that cannot be used stays in force, and the log says
    /// so.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if loaded.looked.elapsed() >= LOOK_AGAIN {
            loaded.looked = Instant::now();
            let now = stamps(&self.files);
            if now != loaded.stamps {
                loaded.stamps = now;
                match acceptor(&self.files) {
                    Ok(acceptor) => {
                        loaded.acceptor = acceptor;
                        tracing::info!(cert = %self.files.cert.display(), "the certificate was read again");
                    }
                    Err(error) => {
                        tracing::error!(%error, "the certificate was changed and cannot be used; the old one stays");
                    }
                }
            }
        }
        loaded.acceptor.clone()
    }
}

fn stamps(files: &TlsFiles) -> [Option<Stamp>; 2] {
    [&files.cert, &files.key].map(|path| {
        let meta = fs::metadata(path).ok()?;
        Some((meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec()))
    })
}

fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, TlsError> {
    let certs = certificates(&files.cert)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| match error {
        pem::Error::Io(source) => TlsError::File { path: files.key.clone(), source },
        _ => TlsError::NoKey { path: files.key.clone() },
    })?;
    let unusable = |problem: String| TlsError::Unusable { cert: files.cert.clone(), key: files.key.clone(), problem };
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("ring has them")
        .with_no_client_auth()
        .with_single_cert(certs, key)
        .map_err(|error| match error {
            tokio_rustls::rustls::Error::InconsistentKeys(_) => unusable("the key is not the certificate's".into()),
            error => unusable(error.to_string()),
        })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let none = || TlsError::NoCertificate { path: path.to_owned() };
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certs) if !certs.is_empty() => Ok(certs),
        Err(pem::Error::Io(source)) => Err(TlsError::File { path: path.to_owned(), source }),
        _ => Err(none()),
    }
}

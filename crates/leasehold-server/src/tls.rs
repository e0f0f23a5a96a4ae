//! TLS: certificate files, which may be replaced while the server runs, and the certificate authorities for webhooks.

use std::fmt::{self, Formatter};
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

use crate::append_cause;

/// How soon a running server notices a replaced certificate.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

/// The PEM files of a certificate and its private key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, followed by its chain.
    pub cert: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
}

/// Why TLS cannot be used. `{:#}` appends the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error(fmt = cannot_read)]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file contains no certificate.
    #[error("{} has no certificate in PEM (-----BEGIN CERTIFICATE-----)", path.display())]
    NoCertificate {
        /// The path of the file.
        path: PathBuf,
    },
    /// A file contains no private key.
    #[error("{} has no private key in PEM (-----BEGIN PRIVATE KEY-----, without a password)", path.display())]
    NoKey {
        /// The path of the file.
        path: PathBuf,
    },
    /// The certificate and the key do not match, or cannot be used.
    #[error("the certificate {} and the key {} cannot be used: {problem}", cert.display(), key.display())]
    Unusable {
        /// The path of the certificate.
        cert: PathBuf,
        /// The path of the private key.
        key: PathBuf,
        /// What is wrong with them.
        problem: String,
    },
    /// The system's CA store is empty.
    #[error(
        "the system's CA store is empty, so https webhooks cannot be verified: install ca-certificates, or set alerts.webhook.ca"
    )]
    NoRoots,
}

fn cannot_read(path: &Path, source: &io::Error, f: &mut Formatter<'_>) -> fmt::Result {
    write!(f, "{} cannot be read", path.display())?;
    append_cause(source, f)
}

/// The cryptography used for all handshakes.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(tokio_rustls::rustls::crypto::ring::default_provider())
}

/// Loads the certificate authorities to trust from a file, or from the system's CA store. The system's administrator
/// decides whom to trust, and system updates apply without a release of ours.
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
                tracing::warn!(%error, "cannot read a certificate authority of this machine");
            }
            roots.add_parsable_certificates(found.certs);
        }
    }
    if roots.is_empty() { Err(TlsError::NoRoots) } else { Ok(roots) }
}

/// A certificate that is reloaded when its files change.
pub(crate) struct Tls {
    files: TlsFiles,
    loaded: Mutex<LoadedCertificate>,
}

struct LoadedCertificate {
    acceptor: TlsAcceptor,
    /// The stamps of the files when they were last read, whether they could be used or not.
    stamps: [Option<FileStamp>; 2],
    checked_at: Instant,
}

/// Distinguishes versions of a file: inode, length, and modification time.
type FileStamp = (u64, u64, i64, i64);

impl Tls {
    pub(crate) fn open(files: &TlsFiles) -> Result<Self, TlsError> {
        let stamps = stamps(files);
        let loaded = LoadedCertificate { acceptor: acceptor(files)?, stamps, checked_at: Instant::now() };
        Ok(Self { files: files.clone(), loaded: Mutex::new(loaded) })
    }

    /// Returns the acceptor for a new connection. If a replaced certificate cannot be used, the old one stays in use
    /// and the error is logged.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if loaded.checked_at.elapsed() >= RELOAD_INTERVAL {
            loaded.checked_at = Instant::now();
            let now = stamps(&self.files);
            if now != loaded.stamps {
                loaded.stamps = now;
                match acceptor(&self.files) {
                    Ok(acceptor) => {
                        loaded.acceptor = acceptor;
                        tracing::info!(cert = %self.files.cert.display(), "the certificate was reloaded");
                    }
                    Err(error) => {
                        tracing::error!(
                            error = %format_args!("{error:#}"),
                            "the certificate has changed and cannot be used; the old one stays in use"
                        );
                    }
                }
            }
        }
        loaded.acceptor.clone()
    }
}

fn stamps(files: &TlsFiles) -> [Option<FileStamp>; 2] {
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
            tokio_rustls::rustls::Error::InconsistentKeys(_) => unusable("they do not match".into()),
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

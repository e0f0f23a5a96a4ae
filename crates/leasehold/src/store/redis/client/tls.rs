//! The TLS handshake.
//!
//! The server must present a certificate for the host in the URL, signed by a trusted authority. Verification cannot be
//! turned off: without it, any machine on the network path could grant locks.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::address::Trust;
use crate::store::{StoreError, StoreErrorKind};

/// Runs the TLS handshake and verifies the server.
pub(super) async fn encrypt(
    stream: TcpStream,
    host: &str,
    trust: &Trust,
    limit: Duration,
) -> Result<TlsStream<TcpStream>, StoreError> {
    let name = ServerName::try_from(host.to_owned())
        .map_err(|_| invalid("the host of a rediss:// URL must be a name or an address".into()))?;
    let connector = TlsConnector::from(Arc::new(tls_config(trust)?));
    let handshake = tokio::time::timeout(limit, connector.connect(name, stream));
    match handshake.await {
        Ok(Ok(encrypted)) => Ok(encrypted),
        Ok(Err(error)) => Err(handshake_error(&error)),
        Err(_) => Err(unreachable("the TLS handshake timed out: does the server use TLS on this port?".into())),
    }
}

fn tls_config(trust: &Trust) -> Result<ClientConfig, StoreError> {
    let mut roots = RootCertStore::empty();
    match trust {
        Trust::File(file) => {
            for certificate in certificates(file)? {
                let unusable = |error| invalid(format!("{}: not a certificate: {error}", file.display()));
                roots.add(certificate).map_err(unusable)?;
            }
        }
        Trust::Machine => {
            let found = rustls_native_certs::load_native_certs();
            // Certificates that cannot be parsed are skipped; some systems have a few.
            roots.add_parsable_certificates(found.certs);
        }
    }
    if roots.is_empty() {
        let text = "this machine has no CA certificates: install ca-certificates, or name a file with ?ca=FILE";
        return Err(invalid(text.into()));
    }
    let versions = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| invalid(error.to_string()))?;
    Ok(versions.with_root_certificates(roots).with_no_client_auth())
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, StoreError> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    read.map_err(|error| invalid(format!("{} cannot be read as certificates: {error}", file.display())))
}

/// A bad certificate stays bad, so it is `Refused`. A broken connection is `Unreachable`, which is retried.
fn handshake_error(error: &io::Error) -> StoreError {
    let about_tls =
        error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<tokio_rustls::rustls::Error>);
    let text = format!("the TLS handshake failed: {error}");
    if about_tls { invalid(text) } else { unreachable(text) }
}

fn invalid(text: String) -> StoreError {
    StoreError::new(StoreErrorKind::Refused, text)
}

fn unreachable(text: String) -> StoreError {
    StoreError::new(StoreErrorKind::Unreachable, text)
}

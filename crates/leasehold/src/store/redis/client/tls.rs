//! TLS in a task of its own, between a connection and its server. The rest of the client reads and writes plain bytes.
//!
//! The server must present a certificate for the host in the URL, signed by a trusted authority. Verification cannot be
//! turned off: without it, any machine on the network path could grant locks.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::address::Trust;
use crate::store::{StoreError, StoreErrorKind};

/// Bytes that are copied at once in one direction.
const CHUNK_BYTES: usize = 16 * 1024;

/// Runs the TLS handshake, verifies the server, and returns the plain end of a socket pair to the TLS task.
pub(super) async fn encrypt(
    stream: TcpStream,
    host: &str,
    trust: &Trust,
    limit: Duration,
) -> Result<UnixStream, StoreError> {
    let name = ServerName::try_from(host.to_owned())
        .map_err(|_| invalid("the host of a rediss:// URL must be a name or an address".into()))?;
    let connector = TlsConnector::from(Arc::new(tls_config(trust)?));
    let handshake = tokio::time::timeout(limit, connector.connect(name, stream));
    let encrypted = match handshake.await {
        Ok(Ok(encrypted)) => encrypted,
        Ok(Err(error)) => return Err(handshake_error(&error)),
        Err(_) => return Err(unreachable("the TLS handshake timed out: does the server use TLS on this port?".into())),
    };
    let (ours, inner) = UnixStream::pair().map_err(|error| unreachable(error.to_string()))?;
    tokio::spawn(forward(encrypted, inner));
    Ok(ours)
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

/// Copies bytes in both directions. When one side closes, the other is closed at once: an abandoned connection must not
/// keep its subscription.
async fn forward(encrypted: TlsStream<TcpStream>, inner: UnixStream) {
    let (from_server, to_server) = tokio::io::split(encrypted);
    let (from_us, to_us) = inner.into_split();
    // The reason does not matter: every unanswered request fails.
    tokio::select! {
        _ = copy(from_server, to_us) => {}
        _ = copy(from_us, to_server) => {}
    }
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let bytes = from.read(&mut chunk).await?;
        if bytes == 0 {
            return Ok(());
        }
        to.write_all(&chunk[..bytes]).await?;
        to.flush().await?;
    }
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

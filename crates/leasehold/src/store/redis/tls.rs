//! TLS: a task of its own stands between a connection and its server, so that nothing else has to know.
//!
//! The server must show a certificate for the host in its URL, signed by somebody who is trusted. There is no
//! way to leave that out: a lock that anybody on the way can grant is none.

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

/// Moved at once in one direction.
const PIECE: usize = 16 * 1024;

/// Makes sure of the server, and answers with the end that is spoken to in the clear.
pub(super) async fn encrypt(
    stream: TcpStream,
    host: &str,
    trust: &Trust,
    within: Duration,
) -> Result<UnixStream, StoreError> {
    let name = ServerName::try_from(host.to_owned())
        .map_err(|_| refused("the host of a rediss:// URL is a name or an address".into()))?;
    let connector = TlsConnector::from(Arc::new(configured(trust)?));
    let shaking_hands = tokio::time::timeout(within, connector.connect(name, stream));
    let encrypted = match shaking_hands.await {
        Ok(Ok(encrypted)) => encrypted,
        Ok(Err(error)) => return Err(not_trusted(&error)),
        Err(_) => return Err(unreachable("no TLS handshake in time: does the server speak TLS on this port?".into())),
    };
    let (ours, inner) = UnixStream::pair().map_err(|error| unreachable(error.to_string()))?;
    tokio::spawn(between(encrypted, inner));
    Ok(ours)
}

fn configured(trust: &Trust) -> Result<ClientConfig, StoreError> {
    let mut roots = RootCertStore::empty();
    match trust {
        Trust::File(file) => {
            for certificate in certificates(file)? {
                let unusable = |error| refused(format!("{}: not a certificate: {error}", file.display()));
                roots.add(certificate).map_err(unusable)?;
            }
        }
        Trust::Machine => {
            let found = rustls_native_certs::load_native_certs();
            // Some machines have some that nobody can read; the others are as good as ever.
            roots.add_parsable_certificates(found.certs);
        }
    }
    if roots.is_empty() {
        let text =
            "nobody is trusted to vouch for a server here: install ca-certificates, or name a file with ?ca=FILE";
        return Err(refused(text.into()));
    }
    let versions = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| refused(error.to_string()))?;
    Ok(versions.with_root_certificates(roots).with_no_client_auth())
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, StoreError> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    read.map_err(|error| refused(format!("{} cannot be read as certificates: {error}", file.display())))
}

/// Carries bytes in both directions. When one side ends, so does the other, at once: a connection that was
/// given up must not go on listening.
async fn between(encrypted: TlsStream<TcpStream>, inner: UnixStream) {
    let (from_server, to_server) = tokio::io::split(encrypted);
    let (from_us, to_us) = inner.into_split();
    // Why it ended is no news: whoever asked something gets an error.
    tokio::select! {
        _ = carry(from_server, to_us) => {}
        _ = carry(from_us, to_server) => {}
    }
}

async fn carry(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        let bytes = from.read(&mut piece).await?;
        if bytes == 0 {
            return Ok(());
        }
        to.write_all(&piece[..bytes]).await?;
        to.flush().await?;
    }
}

/// A certificate that is not good will not be better at the next try; a broken connection may be.
fn not_trusted(error: &io::Error) -> StoreError {
    let about_tls =
        error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<tokio_rustls::rustls::Error>);
    let text = format!("the server was not believed: {error}");
    if about_tls { refused(text) } else { unreachable(text) }
}

fn refused(text: String) -> StoreError {
    StoreError::new(StoreErrorKind::Refused, text)
}

fn unreachable(text: String) -> StoreError {
    StoreError::new(StoreErrorKind::Unreachable, text)
}

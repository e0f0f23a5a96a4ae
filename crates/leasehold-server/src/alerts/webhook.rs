//! The webhook sink: a signed POST of JSON. Redirects are not followed, because they could lead anywhere.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::alert::Notice;
use super::settings::{Secret, Webhook};
use super::target::{self, ConnectError};
use crate::tls;

const TIMESTAMP: &str = "x-leasehold-timestamp";
const SIGNATURE: &str = "x-leasehold-signature";
const DELIVERY: &str = "x-leasehold-delivery";

/// Sends notifications to one webhook.
pub(super) struct WebhookSender {
    webhook: Webhook,
    tls: Option<TlsConnector>,
}

/// Why an attempt to deliver failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeliveryError {
    #[error(transparent)]
    Unreachable(#[from] ConnectError),
    #[error("the TLS handshake failed: {0}")]
    Tls(std::io::Error),
    #[error("the connection broke: {0}")]
    Broke(hyper::Error),
    #[error("it did not answer in time")]
    TooSlow,
    #[error("it answered {0}{1}")]
    Answered(StatusCode, &'static str),
}

impl DeliveryError {
    /// Whether another attempt may succeed.
    pub(super) fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable(ConnectError::Private(_)) => false,
            Self::Answered(status, _) => status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429),
            _ => true,
        }
    }
}

impl WebhookSender {
    /// # Errors
    /// Fails if the certificate authorities cannot be read.
    pub(super) fn new(webhook: &Webhook) -> Result<Self, tls::TlsError> {
        let tls = if webhook.url.is_https() {
            let roots = tls::roots(webhook.ca.as_deref())?;
            let config = ClientConfig::builder_with_provider(tls::provider())
                .with_safe_default_protocol_versions()
                .expect("ring has them")
                .with_root_certificates(roots)
                .with_no_client_auth();
            Some(TlsConnector::from(Arc::new(config)))
        } else {
            None
        };
        Ok(Self { webhook: webhook.clone(), tls })
    }

    pub(super) fn retries(&self) -> u32 {
        self.webhook.retries
    }

    /// The URL without its secret parts.
    pub(super) fn display_url(&self) -> String {
        format!("{:?}", self.webhook.url)
    }

    /// Makes one attempt to deliver a notification.
    pub(super) async fn send(&self, notice: &Notice) -> Result<(), DeliveryError> {
        let body = notice.to_json();
        match tokio::time::timeout(self.webhook.timeout, self.post(&notice.alert.id, body)).await {
            Ok(sent) => sent,
            Err(_) => Err(DeliveryError::TooSlow),
        }
    }

    async fn post(&self, id: &str, body: String) -> Result<(), DeliveryError> {
        let Webhook { url, allow_private, timeout, .. } = &self.webhook;
        let stream = target::connect(url.host(), url.port(), *allow_private, *timeout).await?;
        let request = self.request(id, body);
        let status = match &self.tls {
            None => exchange(stream, request).await.map_err(DeliveryError::Broke)?,
            Some(tls) => {
                let name = ServerName::try_from(url.host().to_owned());
                let name = name.map_err(|error| DeliveryError::Tls(std::io::Error::other(error)))?;
                let stream = tls.connect(name, stream).await.map_err(DeliveryError::Tls)?;
                exchange(stream, request).await.map_err(DeliveryError::Broke)?
            }
        };
        match status {
            status if status.is_success() => Ok(()),
            status if status.is_redirection() => {
                Err(DeliveryError::Answered(status, ", a redirect, which is not followed"))
            }
            status => Err(DeliveryError::Answered(status, "")),
        }
    }

    fn request(&self, id: &str, body: String) -> Request<Body> {
        let url = &self.webhook.url;
        let path = url.uri().path_and_query().map_or("/", axum::http::uri::PathAndQuery::as_str);
        let host = url.uri().authority().map_or("", axum::http::uri::Authority::as_str);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut request = Request::post(path)
            .header(header::HOST, host)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::USER_AGENT, concat!("leasehold/", env!("CARGO_PKG_VERSION")))
            .header(header::CONTENT_LENGTH, body.len())
            .header(DELIVERY, id)
            .header(TIMESTAMP, now);
        if let Some(secret) = &self.webhook.secret {
            request = request.header(SIGNATURE, signature(secret, now, &body));
        }
        request.body(Body::from(body)).expect("a request")
    }
}

/// Returns `v1=` and the HMAC-SHA256, in hex, of the timestamp, a dot and the body.
fn signature(secret: &Secret, timestamp: u64, body: &str) -> String {
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, secret.reveal());
    let tag = ring::hmac::sign(&key, format!("{timestamp}.{body}").as_bytes());
    let hex: String = tag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("v1={hex}")
}

/// Sends a request and reads the head of the response; the rest is not needed.
async fn exchange<S>(stream: S, request: Request<Body>) -> Result<StatusCode, hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let answered = sender.send_request(request);
    tokio::pin!(answered, connection);
    // Drive both here instead of in a task: dropping this future drops the connection.
    let response = tokio::select! {
        biased;
        response = &mut answered => response?,
        // However the connection ended, the response may have arrived before.
        _ = &mut connection => answered.await?,
    };
    Ok(response.status())
}

/// The exponential backoff before attempt `tries`, at most a minute.
pub(super) fn backoff(tries: u32) -> Duration {
    Duration::from_secs(1 << tries.min(6)).min(Duration::from_secs(60))
}

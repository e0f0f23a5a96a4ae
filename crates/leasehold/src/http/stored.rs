//! The stored form of a response: a line of JSON, then the body.

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use futures_util::StreamExt;
use serde::{Deserialize, Serialize};

/// Headers that belong to one connection, session or moment. They are not stored, and not replayed either, because earlier
/// builds stored some of them.
const NOT_STORED: [HeaderName; 7] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::DATE,
    header::SET_COOKIE,
    header::TRANSFER_ENCODING,
    header::TRAILER,
    header::UPGRADE,
];

#[derive(Serialize, Deserialize)]
struct ResponseHead {
    status: u16,
    headers: Vec<(String, String)>,
    /// The body was too large and is not stored.
    #[serde(default)]
    cut: bool,
}

/// A response whose body was read up to the limit.
pub(super) enum Collected {
    /// The response, and its stored form.
    Whole(Response, Vec<u8>),
    /// A response with a larger body, and the stored form, which has only its status.
    Large(Response, Vec<u8>),
    /// The body ended with an error.
    Broken(axum::Error),
}

/// Reads the body of a response, so that it can be stored.
pub(super) async fn collect(response: Response, limit: usize) -> Collected {
    let (parts, body) = response.into_parts();
    let mut stream = body.into_data_stream();
    let (mut chunks, mut length) = (Vec::<Bytes>::new(), 0);
    while let Some(chunk) = stream.next().await {
        match chunk {
            Ok(chunk) => {
                length += chunk.len();
                chunks.push(chunk);
            }
            Err(error) => return Collected::Broken(error),
        }
        if length > limit {
            let written = head(parts.status, &HeaderMap::new(), true);
            let all = futures_util::stream::iter(chunks.into_iter().map(Ok)).chain(stream);
            return Collected::Large(Response::from_parts(parts, Body::from_stream(all)), written);
        }
    }
    let body = chunks.concat();
    let mut written = head(parts.status, &parts.headers, false);
    written.extend_from_slice(&body);
    Collected::Whole(Response::from_parts(parts, Body::from(body)), written)
}

/// Parses a stored response; `None` when its body was too large to be stored.
///
/// # Errors
/// When the value is not a stored response: something else uses the id.
pub(super) fn read(stored: &[u8]) -> Result<Option<Response>, &'static str> {
    let end = stored.iter().position(|byte| *byte == b'\n').ok_or("no first line")?;
    let head: ResponseHead = serde_json::from_slice(&stored[..end]).map_err(|_| "no head")?;
    if head.cut {
        return Ok(None);
    }
    let mut response = Response::new(Body::from(stored[end + 1..].to_vec()));
    *response.status_mut() = StatusCode::from_u16(head.status).map_err(|_| "no status")?;
    for (name, value) in head.headers {
        let value: Option<Vec<u8>> = value.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect();
        let value = value.and_then(|bytes| HeaderValue::from_bytes(&bytes).ok()).ok_or("no header")?;
        let name = name.parse::<HeaderName>().map_err(|_| "no header")?;
        if !NOT_STORED.contains(&name) {
            response.headers_mut().append(name, value);
        }
    }
    Ok(Some(response))
}

fn head(status: StatusCode, headers: &HeaderMap, cut: bool) -> Vec<u8> {
    // JSON has no bytes, so each byte of a value becomes the character with its number.
    let text = |value: &HeaderValue| value.as_bytes().iter().copied().map(char::from).collect();
    let kept = headers.iter().filter(|(name, _)| !NOT_STORED.contains(name));
    let headers = kept.map(|(name, value)| (name.as_str().to_owned(), text(value))).collect();
    let mut head = serde_json::to_vec(&ResponseHead { status: status.as_u16(), headers, cut }).expect("a head is JSON");
    head.push(b'\n');
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response() -> Response {
        let mut response = Response::new(Body::from("hello\n"));
        *response.status_mut() = StatusCode::CREATED;
        for (name, value) in [
            ("x-a", &b"1"[..]),
            ("x-a", b"\xe9"),
            ("date", b"now"),
            ("content-length", b"6"),
            ("set-cookie", b"session=secret"),
        ] {
            response
                .headers_mut()
                .append(HeaderName::from_static(name), HeaderValue::from_bytes(value).expect("valid"));
        }
        response
    }

    #[tokio::test]
    async fn a_response_is_read_back_without_headers_of_the_connection() {
        let Collected::Whole(passed, stored) = collect(response(), 6).await else { panic!("it is small enough") };
        assert_eq!(passed.headers().len(), 5);
        assert!(!stored.windows(6).any(|part| part == b"secret"), "a session is not stored");
        let read = read(&stored).expect("a stored response").expect("whole");
        assert_eq!(read.status(), 201);
        let values: Vec<_> = read.headers().get_all("x-a").iter().map(HeaderValue::as_bytes).collect();
        assert_eq!((values, read.headers().len()), (vec![&b"1"[..], b"\xe9"], 2));
        assert_eq!(axum::body::to_bytes(read.into_body(), 99).await.expect("read"), "hello\n");
    }

    #[test]
    fn a_cookie_that_an_earlier_build_stored_is_not_replayed() {
        let stored = b"{\"status\":200,\"headers\":[[\"set-cookie\",\"a=b\"],[\"x-a\",\"1\"]]}\n";
        let read = read(stored).expect("a stored response").expect("whole");
        assert_eq!((read.headers().len(), &read.headers()["x-a"]), (1, &HeaderValue::from_static("1")));
    }

    #[tokio::test]
    async fn a_large_response_is_passed_on_whole() {
        let Collected::Large(passed, stored) = collect(response(), 5).await else { panic!("it is too large") };
        assert_eq!(axum::body::to_bytes(passed.into_body(), 99).await.expect("read"), "hello\n");
        assert!(read(&stored).expect("a stored response").is_none());
        assert!(read(b"7").is_err() && read(b"7\n").is_err() && read(b"{\"status\":7,\"headers\":[]}\n").is_err());
    }
}

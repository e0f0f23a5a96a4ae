//! An HTTP client that sends exactly the bytes that a test wants and reads one response.

use std::net::SocketAddr;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Sends a request such as `GET /`. The connection stays open. Each line of `headers` ends with a line break; `Host` is not
/// added.
pub async fn send(to: SocketAddr, request: &str, headers: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(to).await.expect("listening");
    let length = body.len();
    let head = format!("{request} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n");
    // A server that rejects the head may close the connection before it has read the body.
    let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
    stream
}

/// Reads the response; `None` if the connection ended without one.
pub async fn receive(mut stream: TcpStream) -> Option<Answer> {
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text).await;
    let text = String::from_utf8(text).expect("text");
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head: head.to_lowercase(), body: body.to_owned() })
}

/// Sends a request and waits for its response.
pub async fn ask(to: SocketAddr, request: &str, headers: &str, body: &str) -> Answer {
    let answer = receive(send(to, request, headers, body).await).await;
    answer.unwrap_or_else(|| panic!("no response to {request}"))
}

/// A parsed response.
#[derive(Debug)]
pub struct Answer {
    /// The status, for example 200.
    pub status: u16,
    /// The status line and the headers, in lower case.
    pub head: String,
    /// The body.
    pub body: String,
}

impl Answer {
    /// Parses the body, which must be JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the status and the `code` of an error.
    pub fn code(&self) -> (u16, String) {
        (self.status, self.json()["code"].as_str().unwrap_or("none").to_owned())
    }

    /// Returns the body of a response that must be 200.
    pub fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }
}

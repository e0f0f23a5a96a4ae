//! A proxied connection: one client, one server, and the frames between them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::rule::{Fault, Rule};
use super::{Command, Shared};
use crate::resp;

/// Forwards until one side or a fault ends the connection. Returns the rule of that fault.
pub(super) async fn serve(
    shared: &Shared,
    mut client: TcpStream,
    pushing: Arc<AtomicBool>,
    reset_asked: oneshot::Receiver<()>,
) -> Option<Rule> {
    let mut upstream = None;
    let forward = async {
        // In a blackhole not even a failed connection to the server is visible.
        shared.passable().await;
        let upstream_now = *shared.upstream();
        match TcpStream::connect(upstream_now).await {
            Ok(stream) => Connection::new(shared, pushing).run(&mut client, upstream.insert(stream)).await,
            Err(_) => End::Reset(None),
        }
    };
    let end = tokio::select! {
        biased;
        _ = reset_asked => End::Reset(None),
        end = forward => end,
    };
    let End::Reset(cause) = end else { return None };
    make_close_a_reset(&client);
    if let Some(server) = &upstream {
        make_close_a_reset(server);
    }
    cause
}

/// Sets a zero linger, so that closing sends RST instead of FIN.
pub(super) fn make_close_a_reset(stream: &TcpStream) {
    // Fails only on a broken socket.
    let _ = stream.set_zero_linger();
}

struct Connection<'a> {
    shared: &'a Shared,
    pushing: Arc<AtomicBool>,
    protocol: Mutex<Protocol>,
}

/// The state that matches replies to commands.
#[derive(Default)]
struct Protocol {
    resp3: bool,
    unanswered: VecDeque<Unanswered>,
    /// The subscribed channels by the kind of their confirmation, such as `subscribe`.
    channels: HashMap<&'static str, HashSet<Vec<u8>>>,
    /// Whether a reply was dropped. Then the client gets no further replies.
    muted: bool,
}

struct Unanswered {
    answer: ProxiedReply,
    fault: Option<(Fault, Rule)>,
}

enum ProxiedReply {
    Reply,
    /// A number of frames of this kind, or one error.
    Confirmations {
        kind: &'static str,
        left: usize,
    },
}

/// A frame or an end in flight.
struct InFlight {
    due: Instant,
    content: Content,
}

enum Content {
    Command(Vec<u8>, Unanswered),
    Reply(Vec<u8>),
    Close,
    Reset(Option<Rule>),
}

enum End {
    Closed,
    Reset(Option<Rule>),
}

impl<'a> Connection<'a> {
    fn new(shared: &'a Shared, pushing: Arc<AtomicBool>) -> Self {
        Self { shared, pushing, protocol: Mutex::default() }
    }

    async fn run(&self, client: &mut TcpStream, server: &mut TcpStream) -> End {
        // Each frame is one write. Fails only on a broken socket, which the readers notice.
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let (client_read, client_write) = client.split();
        let (server_read, server_write) = server.split();
        let (to_server, for_server) = unbounded_channel();
        let (to_client, for_client) = unbounded_channel();
        tokio::select! {
            end = self.read_commands(client_read, to_server) => end,
            end = self.write_to_server(for_server, server_write) => end,
            end = self.read_replies(server_read, to_client) => end,
            end = self.write_to_client(for_client, client_write) => end,
        }
    }

    async fn read_commands(&self, mut from: ReadHalf<'_>, to: UnboundedSender<InFlight>) -> End {
        let mut buffer = Vec::new();
        let last = loop {
            match from.read_buf(&mut buffer).await {
                Ok(0) => break Content::Close,
                Ok(_) => {}
                Err(_) => break Content::Reset(None),
            }
            loop {
                match Command::take_from(&mut buffer) {
                    Ok(Some((command, bytes))) => {
                        let (hold, content) = self.judge(&command, bytes);
                        post(&to, hold + self.shared.command_delay(), content);
                    }
                    Ok(None) => break,
                    Err(error) => return not_resp("a client", &error),
                }
            }
        };
        post(&to, self.shared.command_delay(), last);
        std::future::pending().await
    }

    async fn write_to_server(&self, mut queue: UnboundedReceiver<InFlight>, mut to: WriteHalf<'_>) -> End {
        while let Some(content) = self.next_due(&mut queue).await {
            match content {
                Content::Command(bytes, mut unanswered) => {
                    if let Some((_, rule)) = unanswered.fault.take_if(|(fault, _)| matches!(fault, Fault::HoldBack)) {
                        rule.count_hit();
                        rule.removed().await;
                    }
                    self.protocol().unanswered.push_back(unanswered);
                    // A server that has gone is noticed by the reader, after its last replies.
                    let _ = to.write_all(&bytes).await;
                }
                // The server may still send replies before it closes its side.
                Content::Close => drop(to.shutdown().await),
                Content::Reset(rule) => return End::Reset(rule),
                Content::Reply(_) => unreachable!("replies go to the client"),
            }
        }
        std::future::pending().await
    }

    async fn read_replies(&self, mut from: ReadHalf<'_>, to: UnboundedSender<InFlight>) -> End {
        let mut buffer = Vec::new();
        let last = loop {
            match from.read_buf(&mut buffer).await {
                Ok(0) => break Content::Close,
                Ok(_) => {}
                Err(_) => break Content::Reset(None),
            }
            loop {
                match resp::frame_len(&buffer) {
                    Ok(Some(len)) => {
                        let frame: Vec<u8> = buffer.drain(..len).collect();
                        if let Some((hold, content)) = self.pass(frame) {
                            post(&to, hold + self.shared.reply_delay(), content);
                        }
                    }
                    Ok(None) => break,
                    Err(error) => return not_resp("the server", &error),
                }
            }
        };
        post(&to, self.shared.reply_delay(), last);
        std::future::pending().await
    }

    async fn write_to_client(&self, mut queue: UnboundedReceiver<InFlight>, mut to: WriteHalf<'_>) -> End {
        while let Some(content) = self.next_due(&mut queue).await {
            match content {
                // A client that has gone is noticed by the reader, after its last commands.
                Content::Reply(bytes) => drop(to.write_all(&bytes).await),
                Content::Close => return End::Closed,
                Content::Reset(rule) => return End::Reset(rule),
                Content::Command(..) => unreachable!("commands go to the server"),
            }
        }
        std::future::pending().await
    }

    async fn next_due(&self, queue: &mut UnboundedReceiver<InFlight>) -> Option<Content> {
        let InFlight { due, content } = queue.recv().await?;
        tokio::time::sleep_until(due).await;
        self.shared.passable().await;
        Some(content)
    }

    /// Decides what to do with a command, and how long to hold it.
    fn judge(&self, command: &Command, bytes: Vec<u8>) -> (Duration, Content) {
        let mut hold = Duration::ZERO;
        let fault = match self.shared.judge(command) {
            Some((Fault::CutBefore, rule)) => return (hold, Content::Reset(Some(rule))),
            Some((Fault::HoldCommand(time), rule)) => {
                rule.count_hit();
                hold = time;
                None
            }
            other => other,
        };
        let answer = self.protocol().expect_answer_to(command);
        if matches!(answer, ProxiedReply::Confirmations { .. }) {
            self.pushing.store(true, Ordering::SeqCst);
        }
        (hold, Content::Command(bytes, Unanswered { answer, fault }))
    }

    /// Decides what to do with a frame of the server, and how long to hold it; `None` drops it.
    fn pass(&self, frame: Vec<u8>) -> Option<(Duration, Content)> {
        let mut protocol = self.protocol();
        let fault = match protocol.classify(&frame) {
            FrameKind::Message if self.shared.now().mute_pushes => return None,
            FrameKind::Message | FrameKind::OtherPush => None,
            FrameKind::ProxiedReply => protocol.take_fault(),
        };
        if protocol.muted {
            return None;
        }
        match fault {
            None | Some((Fault::CutBefore | Fault::HoldBack | Fault::HoldCommand(_), _)) => {
                Some((Duration::ZERO, Content::Reply(frame)))
            }
            Some((Fault::HoldReply(hold), rule)) => {
                rule.count_hit();
                Some((hold, Content::Reply(frame)))
            }
            Some((Fault::CutAfter, rule)) => Some((Duration::ZERO, Content::Reset(Some(rule)))),
            Some((Fault::SwallowReply, rule)) => {
                protocol.muted = true;
                rule.count_hit();
                None
            }
        }
    }

    fn protocol(&self) -> MutexGuard<'_, Protocol> {
        self.protocol.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum FrameKind {
    ProxiedReply,
    /// A published message.
    Message,
    OtherPush,
}

impl Protocol {
    fn expect_answer_to(&mut self, command: &Command) -> ProxiedReply {
        match command.name() {
            "SUBSCRIBE" => self.joins("subscribe", command),
            "PSUBSCRIBE" => self.joins("psubscribe", command),
            "SSUBSCRIBE" => self.joins("ssubscribe", command),
            "UNSUBSCRIBE" => self.leaves("unsubscribe", "subscribe", command),
            "PUNSUBSCRIBE" => self.leaves("punsubscribe", "psubscribe", command),
            "SUNSUBSCRIBE" => self.leaves("sunsubscribe", "ssubscribe", command),
            "HELLO" => {
                match command.arg(0) {
                    Some(b"3") => self.resp3 = true,
                    Some(_) => self.resp3 = false,
                    None => {}
                }
                ProxiedReply::Reply
            }
            "RESET" => {
                self.resp3 = false;
                self.channels.clear();
                ProxiedReply::Reply
            }
            _ => ProxiedReply::Reply,
        }
    }

    fn joins(&mut self, kind: &'static str, command: &Command) -> ProxiedReply {
        self.channels.entry(kind).or_default().extend(command.args().map(<[u8]>::to_vec));
        ProxiedReply::Confirmations { kind, left: command.args().len() }
    }

    /// Each channel that is left is confirmed. Leaving all channels without having any is confirmed once.
    fn leaves(&mut self, kind: &'static str, joined: &'static str, command: &Command) -> ProxiedReply {
        let channels = self.channels.entry(joined).or_default();
        let left = if command.args().len() > 0 {
            for channel in command.args() {
                channels.remove(channel);
            }
            command.args().len()
        } else {
            let all = channels.len();
            channels.clear();
            all.max(1)
        };
        ProxiedReply::Confirmations { kind, left }
    }

    fn classify(&self, frame: &[u8]) -> FrameKind {
        let is_push = frame.starts_with(b">");
        // In RESP2 messages and confirmations are ordinary arrays.
        if !is_push && (self.resp3 || !frame.starts_with(b"*")) {
            return FrameKind::ProxiedReply;
        }
        match resp::first_element(frame) {
            Some(b"message" | b"pmessage" | b"smessage") if is_push || !self.channels.is_empty() => FrameKind::Message,
            Some(kind) if is_push && !self.awaits_confirmation(kind) => FrameKind::OtherPush,
            None if is_push => FrameKind::OtherPush,
            _ => FrameKind::ProxiedReply,
        }
    }

    fn awaits_confirmation(&self, pushed: &[u8]) -> bool {
        match self.unanswered.front() {
            Some(Unanswered { answer: ProxiedReply::Confirmations { kind, .. }, .. }) => kind.as_bytes() == pushed,
            _ => false,
        }
    }

    /// Removes the oldest unanswered command and returns the fault for its reply.
    fn take_fault(&mut self) -> Option<(Fault, Rule)> {
        let first = self.unanswered.front_mut()?;
        let fault = first.fault.take();
        match &mut first.answer {
            ProxiedReply::Confirmations { left, .. } if *left > 1 => *left -= 1,
            _ => drop(self.unanswered.pop_front()),
        }
        fault
    }
}

/// Queues content with a delay. Fails only if the connection is ending.
fn post(to: &UnboundedSender<InFlight>, delay: Duration, content: Content) {
    let _ = to.send(InFlight { due: Instant::now() + delay, content });
}

fn not_resp(whose: &str, error: &io::Error) -> End {
    eprintln!("fault proxy: {whose} sent invalid RESP: {error}");
    End::Reset(None)
}

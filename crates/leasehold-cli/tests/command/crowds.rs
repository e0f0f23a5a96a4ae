//! Clients that open connections and never read or never write, and publishers of invalid events, do not affect other
//! clients.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use leasehold_testkit::{full_or, report};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::common::{Place, bare};
use crate::serve::{Serving, memory_kb};

/// Longer than any step here takes, and shorter than the server's timeout for a request.
const LONG: Duration = Duration::from_secs(10);
/// The largest response without a key: 78 kB.
const PAGE: &str = "GET /assets/page.js HTTP/1.1\r\nHost: localhost\r\n\r\n";
/// The responses to all of these together do not fit into the socket buffers of both sides.
const PIPELINED: usize = 100;

/// A request without its body.
const HALF: &str = "POST /api/v1/locks/a/acquire HTTP/1.1\r\nHost: localhost\r\n\
    Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Never {
    Reads,
    Writes,
    /// Sends a request head and part of the body.
    SendsItsBody,
}

async fn connect(from: Ipv4Addr, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((from, 0).into())?;
    socket.connect(to).await
}

/// A client that reconnects a second after the server closed its connection.
async fn stranger(from: Ipv4Addr, to: SocketAddr, never: Never, connected: tokio::sync::mpsc::Sender<()>) {
    let requests = PAGE.repeat(PIPELINED);
    loop {
        let stream = connect(from, to).await;
        let _ = connected.try_send(());
        if let Ok(mut stream) = stream {
            match never {
                // Until it fails: requests without a response are sent again.
                Never::Reads => while stream.write_all(requests.as_bytes()).await.is_ok() {},
                Never::Writes => drop(stream.read_to_end(&mut Vec::new()).await),
                Never::SendsItsBody => {
                    let _ = stream.write_all(HALF.as_bytes()).await;
                    let _ = stream.read_to_end(&mut Vec::new()).await;
                }
            }
        }
        sleep(Duration::from_secs(1)).await;
    }
}

/// Sends one request on a new connection. Returns its latency.
async fn asks(from: Ipv4Addr, to: SocketAddr) -> Duration {
    let began = Instant::now();
    let asked = async {
        let mut stream = connect(from, to).await?;
        stream.write_all(b"GET /api/v1/locks HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        std::io::Result::Ok(text)
    };
    let text = timeout(LONG, asked).await.unwrap_or_else(|_| panic!("locked out: no answer within {LONG:?}"));
    assert!(text.as_ref().is_ok_and(|text| text.starts_with("HTTP/1.1 200")), "from {from}: {text:?}");
    began.elapsed()
}

/// Returns how long the server takes to exit after SIGTERM.
async fn ends(serving: &mut Serving) -> Duration {
    let pid = Pid::from_child(&serving.child);
    let began = Instant::now();
    kill_process(pid, Signal::TERM).expect("it lives");
    while serving.child.try_wait().expect("waited for").is_none() {
        sleep(Duration::from_millis(10)).await;
    }
    began.elapsed()
}

/// Starts a server with this limit of descriptors.
fn serve(place: &Place, descriptors: u64) -> Serving {
    let line = format!("ulimit -n {descriptors} && exec \"$0\" \"$@\"");
    let program = bare(&[]).get_program().to_owned();
    let mut command = Command::new("sh");
    command.args(["-c", &line]).arg(program).args(["serve", "--json", "--listen", "127.0.0.1:0"]);
    command.env("LEASEHOLD_STORE", &place.store).env("HOME", place.home.path());
    let log = std::fs::File::create(place.home.path().join("log")).expect("created");
    Serving::spawn(command.stderr(Stdio::from(log)))
}

#[tokio::test(flavor = "multi_thread")]
async fn s26_stalled_connections_do_not_block_other_clients() {
    let (strangers, descriptors, probes) = full_or((500, 400_u64, 20), (5_000, 8_192, 200));
    // This process has the other end of every connection.
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(20_000, |most| most.min(20_000));
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }).expect("raised");
    let mut figures = Vec::new();
    let all = [Never::Writes, Never::Reads, Never::SendsItsBody];
    for (never, many) in all.into_iter().flat_map(|never| [(never, false), (never, true)]) {
        let place = Place::sqlite();
        let mut serving = serve(&place, descriptors);
        let mut crowd = JoinSet::new();
        let (tell, mut connected) = tokio::sync::mpsc::channel(strangers);
        for n in 0..strangers {
            let from = u16::try_from(n).expect("few") + 256;
            let [high, low] = if many { from.to_be_bytes() } else { [0, 2] };
            crowd.spawn(stranger(Ipv4Addr::new(127, 0, high, low), serving.at, never, tell.clone()));
        }
        for _ in 0..strangers {
            connected.recv().await.expect("connected, or refused");
        }
        let mut took = Vec::with_capacity(probes);
        let mut most_open = 0;
        for n in 0..probes {
            took.push(asks(Ipv4Addr::new(127, 0, 0, if n % 2 == 0 { 1 } else { 3 }), serving.at).await);
            let open = std::fs::read_dir(format!("/proc/{}/fd", serving.child.id())).expect("it lives").count();
            most_open = most_open.max(open);
        }
        took.sort();
        let p99 = took[(took.len() * 99).div_ceil(100) - 1];
        assert!(most_open < usize::try_from(descriptors).expect("few"), "{most_open} descriptors of {descriptors}");
        assert!(p99 < full_or(LONG, Duration::from_millis(100)), "{never:?}, many addresses: {many}: {p99:?}");
        let peak_mb = memory_kb(serving.child.id(), "VmHWM") / 1_024;
        let log = std::fs::read_to_string(place.home.path().join("log")).expect("text");
        assert!(log.len() < 64 * 1_024, "{} bytes of log: {log:.2000}", log.len());
        let from = if many { "many addresses" } else { "one address" };
        let ended = ends(&mut serving).await;
        assert!(ended < Duration::from_secs(5), "{never:?}, many addresses: {many}: it ended after {ended:?}");
        figures.push(format!(
            "never {never:?} from {from}: p99 {p99:.1?}, {most_open} descriptors, {peak_mb} MB, ended in {ended:.1?}"
        ));
        crowd.shutdown().await;
    }
    report("S26", format!("{strangers} strangers, {descriptors} descriptors; {}", figures.join("; ")).to_lowercase());
}

/// Fifteen events of 20 MB, forged alerts and events about no lock, next to a reader of the events.
#[tokio::test(flavor = "multi_thread")]
async fn s27_invalid_events_are_dropped_and_counted() {
    let (large, forged) = full_or((5, 50), (15, 1_000));
    let place = Place::redis().await;
    let redis = place.server.as_ref().expect("a server");
    let serving = Serving::start(&place, &[]);
    let mut stream = connect(Ipv4Addr::LOCALHOST, serving.at).await.expect("listening");
    stream.write_all(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n").await.expect("sent");
    let mut head = [0; 12];
    stream.read_exact(&mut head).await.expect("a head");
    let event = |kind: &str, name: &str, holder: &str, reason: &str| {
        let fields = format!(r#""name":"{name}","owner":"o","holder_id":"{holder}","fence":1,"at_ms":1"#);
        format!(r#"{{"kind":"{kind}",{fields},"reason":"{reason}"}}"#)
    };
    let publish = async |event: String| redis.command(&["PUBLISH", "lh1:events:leasehold", &event]).await;
    let alert = "lua_script_error: made up";
    let before_kb = memory_kb(serving.child.id(), "VmHWM");
    for n in 0..large {
        publish(event("released", &format!("n{n}"), "7f3a91c2b04d", &"x".repeat(20_000_000))).await;
        // Read before the next one comes: the Redis ends a subscriber that is far behind.
        dropped(&serving, n + 1).await;
    }
    for n in 0..forged {
        publish(event("alert", &format!("{n}\\u0007"), "7f3a91c2b04d", alert)).await;
        publish(event("alert", "gpu_lock:0", "nobody", alert)).await;
    }
    dropped(&serving, large + 2 * forged).await;
    assert!(!serving.text("/api/v1/alerts").1.contains("made up"), "none of them is an alert");
    let locks = place.manager().await;
    let guard = locks.lock("real").await.expect("free");
    sleep(Duration::from_millis(700)).await;
    guard.release().await.expect("ours");
    let mut text = String::new();
    while !text.contains("event: released") {
        let mut bytes = [0; 4_096];
        let n = timeout(LONG, stream.read(&mut bytes)).await.expect("in time").expect("read");
        assert!(n > 0, "the stream was closed: {text}");
        text += &String::from_utf8_lossy(&bytes[..n]);
    }
    assert!(
        text.contains("\"real\"") && !text.contains("gap") && !text.contains("xxxx"),
        "no connection lost: {text:.500}"
    );
    let grown_mb = (memory_kb(serving.child.id(), "VmHWM") - before_kb) / 1_024;
    report(
        "S27",
        format!(
            "{large} events of 20 MB and {} forged ones: all dropped and counted, +{grown_mb} MB at the peak",
            2 * forged
        ),
    );
    assert!(grown_mb < 150, "{grown_mb} MB");
}

/// Waits until the server has dropped this many events.
async fn dropped(serving: &Serving, wanted: usize) {
    let began = Instant::now();
    loop {
        let metrics = serving.text("/metrics").1;
        let line = metrics.lines().find(|line| line.starts_with("leasehold_events_dropped_total "));
        let count: usize = line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).expect("counted");
        if count >= wanted {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{count} of {wanted} were dropped");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Idle connections are closed when there are too many; an event stream and a request that waits for a lock are not idle.
#[tokio::test(flavor = "multi_thread")]
async fn streams_and_long_polls_survive_a_flood_of_connections() {
    let place = Place::sqlite();
    let serving = serve(&place, 400);
    let locks = place.manager().await;
    let guard = locks.lock("a").await.expect("free");
    let ask = async |request: String| {
        let mut stream = connect(Ipv4Addr::new(127, 0, 0, 3), serving.at).await.expect("listening");
        stream.write_all(request.as_bytes()).await.expect("sent");
        stream
    };
    let mut streams = ask("GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n".into()).await;
    let mut head = [0; 12];
    streams.read_exact(&mut head).await.expect("a head");
    let body = r#"{"ttl_ms":5000,"wait_ms":20000}"#;
    let head = "POST /api/v1/locks/a/acquire HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n";
    let mut waits = ask(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len())).await;
    while locks.info("a").await.expect("answered").waiters.is_empty() {
        sleep(Duration::from_millis(5)).await;
    }
    let mut crowd = Vec::new();
    for n in 0..600_u16 {
        let [high, low] = (n + 256).to_be_bytes();
        crowd.push(connect(Ipv4Addr::new(127, 0, high, low), serving.at).await.expect("listening"));
    }
    asks(Ipv4Addr::LOCALHOST, serving.at).await;
    guard.release().await.expect("ours");
    let mut answer = String::new();
    timeout(LONG, waits.read_to_string(&mut answer)).await.expect("in time").expect("read");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let mut text = String::new();
    while !text.contains("event: granted") {
        let mut bytes = [0; 4_096];
        let n = timeout(LONG, streams.read(&mut bytes)).await.expect("in time").expect("read");
        assert!(n > 0, "the stream was closed: {text}");
        text += &String::from_utf8_lossy(&bytes[..n]);
    }
    let (_, metrics) = serving.text("/metrics");
    let closed = metrics.lines().find(|line| line.starts_with("leasehold_connections_dropped_total{why=\"idle\"}"));
    let closed: f64 = closed.and_then(|line| line.rsplit(' ').next()?.parse().ok()).expect("counted");
    assert!(closed >= 400.0, "{closed} of the crowd were closed");
}

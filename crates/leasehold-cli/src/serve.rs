//! `serve`: the locks over HTTP. Everything the server is stands in its own crate; here it is only told
//! what to do, and its failures become exit codes.

use std::io::{self, ErrorKind};
use std::path::PathBuf;

use leasehold_server::{KeyFile, ServeError, Server, Settings, TlsFiles};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::ServeArgs;
use crate::exit::{Exit, Failure};
use crate::keys;
use crate::say;
use crate::store::{Choice, from_env};

const LISTEN: &str = "127.0.0.1:8847";

/// Serves until a signal comes.
pub(crate) fn serve(args: ServeArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let (listen, exit) = match args.listen.clone() {
        Some(listen) => (listen, Exit::Usage),
        None => (from_env("LEASEHOLD_LISTEN")?.unwrap_or_else(|| LISTEN.into()), Exit::Config),
    };
    let mut settings = Settings::default();
    settings.hosts = args.hosts;
    settings.keys = key_file(args.keys)?;
    let audit = args.audit.or(from_env("LEASEHOLD_AUDIT")?.map(Into::into));
    settings.audit = audit.or_else(|| keys::beside_the_store("audit.jsonl"));
    settings.tls = args.tls_cert.zip(args.tls_key).map(|(cert, key)| TlsFiles { cert, key });
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    log_to_stderr()?;
    // More than one thread: somebody who asks for a long list keeps nobody else waiting.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(Exit::Unreachable, format!("no runtime: {error}")))?;
    runtime.block_on(async {
        let address = tokio::net::lookup_host(&listen).await.ok().and_then(|mut found| found.next());
        let Some(address) = address else {
            return Err(Failure::new(exit, format!("{listen} is no address to listen on; write 127.0.0.1:8847")));
        };
        let locks = store.connect().await?;
        let server = Server::new(locks.clone(), settings);
        server.check(address).map_err(refused)?;
        let listener = TcpListener::bind(address).await.map_err(|error| not_bound(&listen, &error))?;
        let address = listener.local_addr().map_err(|error| not_bound(&listen, &error))?;
        let shutdown = signalled()?;
        if json {
            say::json(&json!({ "url": format!("{scheme}://{address}"), "store": locks.store() }))?;
        } else {
            say::talk(&format!("serving {} at {scheme}://{address} · Ctrl-C ends it", locks.store()));
        }
        let served = server.run(listener, shutdown).await;
        locks.shutdown().await;
        served.map_err(refused)?;
        Ok(Exit::Done)
    })
}

/// The keys that are in force: those somebody named, or the default file if it exists.
fn key_file(flag: Option<PathBuf>) -> Result<Option<KeyFile>, Failure> {
    let Some((file, named)) = keys::file(flag)? else { return Ok(None) };
    match file.entries().map_err(keys::refused)? {
        Some(entries) if !entries.is_empty() => Ok(Some(file)),
        None if !named => Ok(None),
        // Revoking the last key must not open the door to everybody.
        _ => {
            let line = format!("there are no keys in {}: make one with leasehold keys create", file.path().display());
            Err(Failure::new(Exit::Config, line))
        }
    }
}

/// Done at the first SIGTERM or SIGINT.
fn signalled() -> Result<impl Future<Output = ()>, Failure> {
    let on = |kind| {
        signal(kind).map_err(|error| Failure::new(Exit::Unreachable, format!("signals cannot be caught: {error}")))
    };
    let (mut terminate, mut interrupt) = (on(SignalKind::terminate())?, on(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

fn refused(error: ServeError) -> Failure {
    match error {
        ServeError::Listener(_) => Failure::new(Exit::Unreachable, error.to_string()),
        _ => Failure::new(Exit::Config, error.to_string()),
    }
}

fn not_bound(listen: &str, error: &io::Error) -> Failure {
    match error.kind() {
        ErrorKind::AddrInUse => Failure::new(
            Exit::Unreachable,
            format!("{listen} is taken: another server listens there; stop it, or choose another with --listen"),
        ),
        ErrorKind::PermissionDenied => Failure::new(
            Exit::Config,
            format!("{listen} may not be listened on by this user: choose a port above 1023"),
        ),
        _ => Failure::new(Exit::Config, format!("{listen} cannot be listened on: {error}")),
    }
}

/// What the server has to say, a line each; `RUST_LOG` says how much (`info` unless set).
fn log_to_stderr() -> Result<(), Failure> {
    let filter = match from_env("RUST_LOG")? {
        None => Targets::new().with_default(LevelFilter::INFO),
        Some(text) => text.parse().map_err(|error| Failure::new(Exit::Config, format!("RUST_LOG: {error}")))?,
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(false);
    // Nobody logs before this in the process.
    let _ = tracing_subscriber::registry().with(lines).with(filter).try_init();
    Ok(())
}

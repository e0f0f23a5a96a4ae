//! `serve`: the locks over HTTP. Everything the server is stands in its own crate; here it is only told
//! what to do, and its failures become exit codes.

use std::io::{self, ErrorKind};
use std::path::PathBuf;

use leasehold::config::{Origin, Settings as Layers};
use leasehold_server::{KeyFile, ServeError, Server, Settings};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::{Global, ServeArgs};
use crate::config::{self, InForce};
use crate::exit::{Exit, Failure};
use crate::keys;
use crate::say;
use crate::store::{Choice, from_env};

/// Descriptors that a server can make use of.
const DESCRIPTORS: u64 = 8_192;

/// Serves until a signal comes.
pub(crate) fn serve(args: ServeArgs, global: &Global) -> Result<Exit, Failure> {
    let ServeArgs { listen, hosts, keys, audit, tls_cert, tls_key } = args;
    let path = |path: PathBuf| path.display().to_string();
    let flags = [
        ("server.listen", listen),
        ("server.hosts", (!hosts.is_empty()).then(|| hosts.join(","))),
        ("server.keys", keys.map(path)),
        ("server.audit", audit.map(path)),
        ("server.tls.cert", tls_cert.map(path)),
        ("server.tls.key", tls_key.map(path)),
    ];
    let said = |layers: Layers, (key, value): (&str, Option<String>)| match value {
        Some(value) => layers.set(key, value),
        None => layers,
    };
    let InForce { config, server, shown } = InForce::read(flags.into_iter().fold(config::layers(global), said))?;
    let by_flag = shown.iter().any(|shown| shown.key == "server.listen" && shown.origin == Origin::Explicit);
    let mut settings = Settings::default();
    settings.hosts = server.hosts;
    settings.keys = key_file(server.keys)?;
    settings.audit = server.audit.or_else(|| keys::beside_the_store("audit.jsonl"));
    settings.monitor = config.gpu_lock_monitor.clone();
    settings.connections_per_address = server.connections_per_address;
    settings.tls = server.tls;
    settings.alerts = server.alerts;
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let store = Choice::with(global, Some(config))?;
    let (listen, json) = (server.listen.as_str().to_owned(), global.json);
    log_to_stderr()?;
    raise_descriptor_limit();
    // More than one thread: somebody who asks for a long list keeps nobody else waiting.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(Exit::Unreachable, format!("no runtime: {error}")))?;
    runtime.block_on(async {
        let address = tokio::net::lookup_host(&listen).await.ok().and_then(|mut found| found.next());
        let Some(address) = address else {
            let exit = if by_flag { Exit::Usage } else { Exit::Config };
            return Err(Failure::new(exit, format!("{listen} is no address to listen on; write 127.0.0.1:8847")));
        };
        let locks = store.connect().await?;
        let server = Server::new(locks.clone(), settings);
        server.may_listen_on(address).map_err(refused)?;
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
fn key_file(named: Option<PathBuf>) -> Result<Option<KeyFile>, Failure> {
    let Some((file, named)) = keys::file(named) else { return Ok(None) };
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

/// Raises the soft limit towards the hard one: shells and service managers start programs with 1,024, and every
/// connection needs a descriptor.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(DESCRIPTORS, |most| most.min(DESCRIPTORS));
    if limit.current.is_some_and(|current| current < wanted) {
        let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum });
        if let Err(error) = raised {
            tracing::warn!(%error, "the descriptor limit could not be raised");
        }
    }
}

/// Done at the first SIGTERM or SIGINT.
pub(crate) fn signalled() -> Result<impl Future<Output = ()>, Failure> {
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

pub(crate) fn refused(error: ServeError) -> Failure {
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

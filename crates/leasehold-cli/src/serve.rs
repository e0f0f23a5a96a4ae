//! `serve`: configures the server of the crate `leasehold-server`, and maps its errors to exit codes.

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
use crate::config::{self, EffectiveConfig};
use crate::exit::{Exit, Failure};
use crate::keys;
use crate::output;
use crate::store::{Choice, from_env};

/// The soft limit of open descriptors for a server.
const DESCRIPTORS: u64 = 8_192;

/// Runs the server until SIGTERM or SIGINT.
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
    let set = |layers: Layers, (key, value): (&str, Option<String>)| match value {
        Some(value) => layers.set(key, value),
        None => layers,
    };
    let EffectiveConfig { config, server, shown } =
        EffectiveConfig::read(flags.into_iter().fold(config::layers(global), set))?;
    let by_flag = shown.iter().any(|shown| shown.key == "server.listen" && shown.origin == Origin::Explicit);
    let mut settings = Settings::default();
    settings.hosts = server.hosts;
    settings.keys = key_file(server.keys)?;
    settings.audit = server.audit.or_else(|| keys::next_to_default_store("audit.jsonl"));
    settings.monitor = config.gpu_lock_monitor.clone();
    settings.connections_per_address = server.connections_per_address;
    settings.tls = server.tls;
    settings.alerts = server.alerts;
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let store = Choice::with(global, Some(config))?;
    let (listen, json) = (server.listen.as_str().to_owned(), global.json);
    log_to_stderr()?;
    raise_descriptor_limit();
    // Several threads: a request for a long list does not delay other requests.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| Failure::new(Exit::Unreachable, format!("cannot start the runtime: {error}")))?;
    runtime.block_on(async {
        let address = tokio::net::lookup_host(&listen).await.ok().and_then(|mut found| found.next());
        let Some(address) = address else {
            let exit = if by_flag { Exit::Usage } else { Exit::Config };
            return Err(Failure::new(
                exit,
                format!("{listen} is not a valid address; write HOST:PORT, such as 127.0.0.1:8847"),
            ));
        };
        let locks = store.connect().await?;
        let server = Server::new(locks.clone(), settings);
        server.may_listen_on(address).map_err(serve_failure)?;
        let listener = TcpListener::bind(address).await.map_err(|error| bind_failure(&listen, &error))?;
        let address = listener.local_addr().map_err(|error| bind_failure(&listen, &error))?;
        let shutdown = shutdown_signal()?;
        if json {
            output::json(&json!({ "url": format!("{scheme}://{address}"), "store": locks.store() }))?;
        } else {
            output::message(&format!("serving {} at {scheme}://{address} · stop with Ctrl-C", locks.store()));
        }
        let served = server.run(listener, shutdown).await;
        locks.shutdown().await;
        served.map_err(serve_failure)?;
        Ok(Exit::Done)
    })
}

/// Returns the key file that the user chose, or the default one if it exists.
fn key_file(named: Option<PathBuf>) -> Result<Option<KeyFile>, Failure> {
    let Some((file, named)) = keys::file(named) else { return Ok(None) };
    match file.entries().map_err(keys::key_failure)? {
        Some(entries) if !entries.is_empty() => Ok(Some(file)),
        None if !named => Ok(None),
        // A server without keys needs no authentication. Revoking the last key must not have that effect.
        _ => {
            let line =
                format!("there are no keys in {}: create one with `leasehold keys create`", file.path().display());
            Err(Failure::new(Exit::Config, line))
        }
    }
}

/// Raises the soft limit of descriptors. Every connection needs one, and shells and service managers set it to 1,024.
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

/// Returns a future that completes at the first SIGTERM or SIGINT.
pub(crate) fn shutdown_signal() -> Result<impl Future<Output = ()>, Failure> {
    let on =
        |kind| signal(kind).map_err(|error| Failure::new(Exit::Unreachable, format!("cannot catch signals: {error}")));
    let (mut terminate, mut interrupt) = (on(SignalKind::terminate())?, on(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

pub(crate) fn serve_failure(error: ServeError) -> Failure {
    let exit = if matches!(error, ServeError::Listener(_)) { Exit::Unreachable } else { Exit::Config };
    Failure::new(exit, format!("{error:#}"))
}

fn bind_failure(listen: &str, error: &io::Error) -> Failure {
    match error.kind() {
        ErrorKind::AddrInUse => Failure::new(
            Exit::Unreachable,
            format!("{listen} is in use by another server: stop it, or choose another address with --listen"),
        ),
        ErrorKind::PermissionDenied => {
            Failure::new(Exit::Config, format!("not permitted to listen on {listen}: choose a port above 1023"))
        }
        _ => Failure::new(Exit::Config, format!("cannot listen on {listen}: {error}")),
    }
}

/// Logs to stderr at the level of `RUST_LOG` (default: `info`).
fn log_to_stderr() -> Result<(), Failure> {
    let filter = match from_env("RUST_LOG")? {
        None => Targets::new().with_default(LevelFilter::INFO),
        Some(text) => text.parse().map_err(|error| Failure::new(Exit::Config, format!("RUST_LOG: {error}")))?,
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(false);
    // Nothing is logged before this.
    let _ = tracing_subscriber::registry().with(lines).with(filter).try_init();
    Ok(())
}

//! The section `server` of the configuration file. The library reads the settings of the locks and of
//! `gpu_lock_monitor`.

use std::path::PathBuf;

use leasehold::config::{Setting, Settings as Layers};

use crate::alerts::AlertSettings;
use crate::tls::TlsFiles;

/// The default listen address.
const DEFAULT_LISTEN: &str = "127.0.0.1:8847";

/// The configuration of a server, from a file, the environment and flags.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerConfig {
    /// `server.listen`: the address to listen on.
    pub listen: Listen,
    /// `server.hosts`: host names that requests may be addressed to, besides `localhost` and plain IP addresses.
    pub hosts: Vec<String>,
    /// `server.keys`: the file of API keys.
    pub keys: Option<PathBuf>,
    /// `server.audit`: the file of audit lines.
    pub audit: Option<PathBuf>,
    /// `server.connections_per_address`: the most connections one address may have open.
    pub connections_per_address: Option<usize>,
    /// `server.tls.cert` and `server.tls.key`: the certificate to serve HTTPS with.
    pub tls: Option<TlsFiles>,
    /// `alerts`: where alerts are sent.
    pub alerts: AlertSettings,
}

impl ServerConfig {
    /// Reads the server's settings from `layers`, from which other parts read theirs. The result is meaningful only if
    /// [`finish`](Layers::finish) then reports no error.
    pub fn read(layers: &mut Layers) -> Self {
        // The older names of these variables.
        layers.also("server.listen", "LEASEHOLD_LISTEN");
        layers.also("server.keys", "LEASEHOLD_KEYS");
        layers.also("server.audit", "LEASEHOLD_AUDIT");
        let (cert, key): (Option<PathBuf>, Option<PathBuf>) =
            (layers.get("server.tls.cert", None), layers.get("server.tls.key", None));
        match (&cert, &key) {
            (Some(_), None) => layers.refuse("server.tls.cert", "is set without server.tls.key: set both"),
            (None, Some(_)) => layers.refuse("server.tls.key", "is set without server.tls.cert: set both"),
            _ => {}
        }
        let per_address: Option<u32> = layers.get("server.connections_per_address", None);
        if per_address == Some(0) {
            layers.refuse("server.connections_per_address", "must be at least 1");
        }
        Self {
            connections_per_address: per_address.and_then(|most| usize::try_from(most).ok()),
            listen: layers.get("server.listen", Listen(DEFAULT_LISTEN.into())),
            hosts: layers.get("server.hosts", Hosts::default()).0,
            keys: layers.get("server.keys", None),
            audit: layers.get("server.audit", None),
            tls: cert.zip(key).map(|(cert, key)| TlsFiles { cert, key }),
            alerts: AlertSettings::read(layers),
        }
    }
}

/// A listen address: a host and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen(String);

impl Listen {
    /// Returns `HOST:PORT`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Setting for Listen {
    fn parse(text: &str) -> Result<Self, String> {
        let port = text.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
        match port {
            Some(Ok(_)) => Ok(Self(text.to_owned())),
            _ => Err(format!("`{text}` is not a valid address: write HOST:PORT, such as {DEFAULT_LISTEN}")),
        }
    }

    fn show(&self) -> String {
        self.0.clone()
    }
}

/// The host names of a server.
#[derive(Debug, Default)]
struct Hosts(Vec<String>);

impl Setting for Hosts {
    fn parse(text: &str) -> Result<Self, String> {
        Self::checked(Vec::parse(text)?)
    }

    fn show(&self) -> String {
        if self.0.is_empty() { "(none)".into() } else { self.0.show() }
    }

    fn read(written: &leasehold::config::Written) -> Result<Self, String> {
        Self::checked(Vec::read(written)?)
    }
}

impl Hosts {
    fn checked(hosts: Vec<String>) -> Result<Self, String> {
        let is_name = |host: &String| {
            !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'))
        };
        match hosts.iter().find(|host| !is_name(host)) {
            Some(host) => Err(format!("`{host}` is not a host name: write it without scheme and port")),
            None => Ok(Self(hosts)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ServerConfig, Vec<String>> {
        let mut layers = Layers::new().yaml("server.yaml", text);
        let config = ServerConfig::read(&mut layers);
        match layers.finish() {
            Ok(_) => Ok(config),
            Err(error) => Err(error.problems().iter().map(|p| format!("{}: {}", p.origin(), p.text())).collect()),
        }
    }

    #[test]
    fn the_section_is_read() {
        let config = read("").expect("valid");
        assert_eq!((config.listen.as_str(), config.hosts.len()), ("127.0.0.1:8847", 0));
        assert_eq!((config.keys, config.audit, config.tls), (None, None, None));
        let text = "server:\n  listen: '[::1]:9000'\n  hosts: [locks.example, b.example]\n  keys: k.json\n  \
                    audit: a.jsonl\n  connections_per_address: 3000\n  tls: {cert: c.pem, key: k.pem}\n";
        let config = read(text).expect("valid");
        assert_eq!(config.connections_per_address, Some(3_000));
        assert_eq!((config.listen.as_str(), config.hosts.join(" ")), ("[::1]:9000", "locks.example b.example".into()));
        assert_eq!((config.keys, config.audit), (Some("k.json".into()), Some("a.jsonl".into())));
        assert_eq!(config.tls, Some(TlsFiles { cert: "c.pem".into(), key: "k.pem".into() }));
        assert_eq!(read("server: {hosts: 'a.example, b.example'}").expect("valid").hosts, ["a.example", "b.example"]);
    }

    #[test]
    fn each_wrong_value_gives_one_clear_line() {
        let address = "is not a valid address: write HOST:PORT, such as 127.0.0.1:8847";
        for (text, line) in [
            ("server: {listen: 8847}", format!("server.yaml:1:18: server.listen: `8847` {address}")),
            ("server: {listen: ':8847'}", format!("server.yaml:1:18: server.listen: `:8847` {address}")),
            ("server: {listen: 'a:99999'}", format!("server.yaml:1:18: server.listen: `a:99999` {address}")),
            (
                "server: {hosts: ['http://a']}",
                "server.yaml:1:17: server.hosts: `http://a` is not a host name: write it without scheme and port"
                    .into(),
            ),
            (
                "server:\n  tls:\n    cert: c.pem",
                "server.yaml:3:11: server.tls.cert: is set without server.tls.key: set both".into(),
            ),
            (
                "server: {tls: {key: k.pem}}",
                "server.yaml:1:21: server.tls.key: is set without server.tls.cert: set both".into(),
            ),
            (
                "server: {connections_per_address: 0}",
                "server.yaml:1:35: server.connections_per_address: must be at least 1".into(),
            ),
            ("server: {keys: ''}", "server.yaml:1:16: server.keys: is empty: write a path".into()),
            (
                "server: {lisen: 'a:1'}",
                "server.yaml:1:10: server.lisen is not known; did you mean server.listen?".into(),
            ),
            ("server: 5", "server.yaml:1:9: server is a section, not one value".into()),
        ] {
            assert_eq!(read(text).expect_err("wrong"), [line], "{text}");
        }
    }
}

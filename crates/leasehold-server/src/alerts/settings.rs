//! The section `alerts` of the configuration. Nothing here reveals a secret; the path of a webhook often is one.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use axum::http::Uri;
use leasehold::config::{Setting, Settings, Written};

use super::condition::Level;

/// The shortest accepted secret. A secret that can be guessed protects nothing.
const MIN_SECRET_BYTES: usize = 16;
/// The most retries of a delivery.
const MAX_RETRIES: u32 = 20;

/// Where alerts are sent. By default they are only logged.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AlertSettings {
    /// `alerts.log`: whether alerts are logged.
    pub log: bool,
    /// `alerts.level`: the lowest level that the webhook and the command receive.
    pub level: AlertLevel,
    /// `alerts.window`: the window of the rules over the fleet's counters.
    pub window: Duration,
    /// `alerts.webhook`: the URL that receives alerts.
    pub webhook: Option<Webhook>,
    /// `alerts.command`: the program that is run for each alert.
    pub command: Option<AlertCommand>,
}

/// The lowest level that is sent: `warning` or `critical`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AlertLevel(pub(super) Level);

/// A webhook that receives alerts.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Webhook {
    /// `alerts.webhook.url`: where alerts are sent.
    pub url: WebhookUrl,
    /// `alerts.webhook.secret`: the secret that signs each delivery.
    pub secret: Option<Secret>,
    /// `alerts.webhook.timeout`: the timeout of one attempt.
    pub timeout: Duration,
    /// `alerts.webhook.retries`: how often a failed delivery is retried.
    pub retries: u32,
    /// `alerts.webhook.allow_private`: whether the host may resolve to loopback, private and link-local addresses.
    pub allow_private: bool,
    /// `alerts.webhook.ca`: a file of certificate authorities to trust instead of the system's CA store.
    pub ca: Option<PathBuf>,
}

/// A program that is run for every alert.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AlertCommand {
    /// `alerts.command.run`: the program and its arguments; with `shell`, one line for `/bin/sh`.
    pub run: CommandLine,
    /// `alerts.command.shell`: whether `/bin/sh` runs the command.
    pub shell: bool,
    /// `alerts.command.timeout`: after this time the command is killed.
    pub timeout: Duration,
}

/// A program and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine(pub(super) Vec<String>);

/// The URL of a webhook. `Debug` hides the parts that may be secret.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookUrl(Uri);

/// A secret. `Debug` hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl AlertSettings {
    /// Reads the section `alerts` from settings that other parts read from too.
    pub fn read(settings: &mut Settings) -> Self {
        Self {
            log: settings.get("alerts.log", true),
            level: settings.get("alerts.level", AlertLevel(Level::Warning)),
            window: bounded(settings, "alerts.window", Duration::from_secs(3_600)),
            webhook: Webhook::read(settings),
            command: AlertCommand::read(settings),
        }
    }
}

impl Default for AlertSettings {
    fn default() -> Self {
        Self::read(&mut Settings::new())
    }
}

impl Webhook {
    fn read(settings: &mut Settings) -> Option<Self> {
        let url = settings.get("alerts.webhook.url", Optional(None));
        let secret = settings.get("alerts.webhook.secret", Optional(None));
        let timeout = bounded(settings, "alerts.webhook.timeout", Duration::from_secs(10));
        let retries = settings.get("alerts.webhook.retries", 6);
        if retries > MAX_RETRIES {
            settings.refuse("alerts.webhook.retries", &format!("is {retries}; at most {MAX_RETRIES}"));
        }
        let allow_private = settings.get("alerts.webhook.allow_private", false);
        let ca: Optional<FilePath> = settings.get("alerts.webhook.ca", Optional(None));
        if url.0.is_none() && secret.0.is_some() {
            settings.refuse("alerts.webhook.secret", "signs deliveries, but alerts.webhook.url is not set");
        }
        let (url, secret, ca) = (url.0?, secret.0, ca.0.map(|file| file.0));
        Some(Self { url, secret, timeout, retries, allow_private, ca })
    }
}

impl AlertCommand {
    fn read(settings: &mut Settings) -> Option<Self> {
        let run: Optional<CommandLine> = settings.get("alerts.command.run", Optional(None));
        let shell = settings.get("alerts.command.shell", false);
        let timeout = bounded(settings, "alerts.command.timeout", Duration::from_secs(30));
        if shell && run.0.as_ref().is_some_and(|run| run.0.len() > 1) {
            settings.refuse("alerts.command.run", "is a list; with alerts.command.shell it is one line for the shell");
        }
        Some(Self { run: run.0?, shell, timeout })
    }
}

/// Reads a duration that must be between 100 ms and one day.
fn bounded(settings: &mut Settings, key: &str, default: Duration) -> Duration {
    const LEAST: Duration = Duration::from_millis(100);
    const MOST: Duration = Duration::from_secs(24 * 60 * 60);
    let value = settings.get(key, default);
    if (LEAST..=MOST).contains(&value) {
        return value;
    }
    settings.refuse(key, &format!("is {}; it must be 100ms to 1d", value.show()));
    default
}

/// A setting without a default.
struct Optional<T>(Option<T>);

impl<T: Setting> Setting for Optional<T> {
    fn parse(text: &str) -> Result<Self, String> {
        T::parse(text).map(|value| Self(Some(value)))
    }

    fn show(&self) -> String {
        self.0.as_ref().map_or_else(|| "(none)".into(), T::show)
    }

    fn read(written: &Written) -> Result<Self, String> {
        T::read(written).map(|value| Self(Some(value)))
    }
}

struct FilePath(PathBuf);

impl Setting for FilePath {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Err("is empty: write the path of a file".into()) } else { Ok(Self(text.into())) }
    }

    fn show(&self) -> String {
        self.0.display().to_string()
    }
}

impl Setting for AlertLevel {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "warning" => Ok(Self(Level::Warning)),
            "critical" => Ok(Self(Level::Critical)),
            _ => Err(format!("`{text}` is neither `warning` nor `critical`")),
        }
    }

    fn show(&self) -> String {
        self.0.as_str().to_owned()
    }
}

impl Setting for CommandLine {
    fn parse(text: &str) -> Result<Self, String> {
        Self::read(&Written::List(vec![text.to_owned()]))
    }

    fn show(&self) -> String {
        // Arguments may be secrets.
        let more = if self.0.len() > 1 { " …" } else { "" };
        format!("{}{more}", self.0[0].split(' ').next().unwrap_or(""))
    }

    fn read(written: &Written) -> Result<Self, String> {
        let words = match written {
            Written::Text(text) => vec![text.clone()],
            Written::List(words) => words.clone(),
            _ => return Err("is neither a program nor a list".into()),
        };
        match words.first() {
            Some(program) if !program.trim().is_empty() => Ok(Self(words)),
            _ => Err("has no program: write a path, or a list of a path and arguments".into()),
        }
    }
}

impl WebhookUrl {
    pub(super) fn uri(&self) -> &Uri {
        &self.0
    }

    /// The host name or address, without the brackets of IPv6.
    pub(super) fn host(&self) -> &str {
        self.0.host().unwrap_or("").trim_start_matches('[').trim_end_matches(']')
    }

    pub(super) fn is_https(&self) -> bool {
        self.0.scheme_str() == Some("https")
    }

    pub(super) fn port(&self) -> u16 {
        self.0.port_u16().unwrap_or(if self.is_https() { 443 } else { 80 })
    }
}

impl Setting for WebhookUrl {
    /// Parses a URL. Errors never repeat the text, because all of it may be secret.
    fn parse(text: &str) -> Result<Self, String> {
        let uri: Uri = text.parse().map_err(|_| "is not a URL: write https://host/path".to_owned())?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err("is not an http or https URL: write https://host/path".into());
        }
        let authority = uri.authority().map_or("", axum::http::uri::Authority::as_str);
        if authority.contains('@') {
            return Err("has a user or password, which are not sent: remove them".into());
        }
        if uri.host().is_none_or(str::is_empty) {
            return Err("has no host: write https://host/path".into());
        }
        if authority.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']') && port.parse::<u16>().is_err()) {
            return Err("has an invalid port: write https://host:443/path".into());
        }
        Ok(Self(uri))
    }

    fn show(&self) -> String {
        let scheme = if self.is_https() { "https" } else { "http" };
        let rest = if self.0.path() == "/" && self.0.query().is_none() { "" } else { "/…" };
        format!("{scheme}://{}{rest}", self.0.authority().map_or("", axum::http::uri::Authority::as_str))
    }
}

impl fmt::Debug for WebhookUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.show())
    }
}

impl Secret {
    pub(super) fn reveal(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl Setting for Secret {
    fn parse(text: &str) -> Result<Self, String> {
        if text.len() < MIN_SECRET_BYTES {
            return Err(format!("is shorter than {MIN_SECRET_BYTES} bytes: create one with `openssl rand -hex 32`"));
        }
        Ok(Self(text.to_owned()))
    }

    fn show(&self) -> String {
        "(set)".into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_section_alerts_is_read() {
        let text = "
alerts:
  level: critical
  window: 10m
  webhook:
    url: https://hooks.example/T000/canary-path
    secret: canary-secret-0123456789
    retries: 2
  command:
    run: [/usr/local/bin/page, --team, ops]
";
        let mut settings = Settings::new().yaml("l.yaml", text);
        let alerts = AlertSettings::read(&mut settings);
        let shown = settings.finish().expect("right");
        assert_eq!((alerts.level, alerts.window.as_secs()), (AlertLevel(Level::Critical), 600));
        let webhook = alerts.webhook.clone().expect("one");
        assert_eq!((webhook.retries, webhook.allow_private, webhook.url.port()), (2, false, 443));
        assert_eq!(alerts.command.clone().expect("one").run.0.len(), 3);
        let said = format!("{alerts:?} {shown:?}");
        assert!(said.contains("https://hooks.example/…") && !said.contains("canary"), "{said}");
    }

    #[test]
    fn errors_reveal_no_secrets() {
        for (text, place) in [
            ("alerts:\n  webhook:\n    url: hooks.example/canary\n", "3:10"),
            ("alerts:\n  webhook:\n    url: ftp://hooks.example/canary\n", "3:10"),
            ("alerts:\n  webhook:\n    url: https://u:canary@hooks.example/\n", "3:10"),
            ("alerts:\n  webhook:\n    url: https://hooks.example:99999/canary\n", "3:10"),
            ("alerts:\n  webhook:\n    url: https://h/\n    secret: canary\n", "4:13"),
            ("alerts:\n  webhook:\n    secret: canary-secret-0123456789\n", "3:13"),
            ("alerts:\n  webhook:\n    url: https://h/\n    retries: 999\n", "4:14"),
            ("alerts:\n  webhook:\n    url: https://h/\n    timeout: 0\n", "4:14"),
            ("alerts:\n  command:\n    run: []\n", "3:10"),
            ("alerts:\n  command:\n    run: [a, b]\n    shell: true\n", "3:10"),
            ("alerts:\n  level: loud\n", "2:10"),
            ("alerts:\n  webhok:\n    url: https://h/\n", "2:3"),
        ] {
            let mut settings = Settings::new().yaml("l.yaml", text);
            AlertSettings::read(&mut settings);
            let refused = settings.finish().expect_err(text).to_string();
            assert!(refused.starts_with(&format!("l.yaml:{place}: alerts")), "{refused}");
            assert!(!refused.contains("canary"), "{refused}");
        }
    }
}

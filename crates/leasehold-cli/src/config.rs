//! The configuration from file, environment and flags: `config check`, `config show`, and the settings of `serve`.

use leasehold::config::{Config, ConfigError, Origin, Problem, Settings, Shown};
use leasehold_server::ServerConfig;
use serde_json::{Value, json};

use crate::cli::{ConfigCommand, Global};
use crate::exit::{Exit, Failure};
use crate::output;

/// The effective configuration.
pub(crate) struct EffectiveConfig {
    pub(crate) config: Config,
    pub(crate) server: ServerConfig,
    /// Each value and its origin.
    pub(crate) shown: Vec<Shown>,
}

impl EffectiveConfig {
    /// Reads the whole configuration. The error lists all mistakes.
    pub(crate) fn read(mut layers: Settings) -> Result<Self, ConfigError> {
        let (config, server) = (Config::read(&mut layers), ServerConfig::read(&mut layers));
        Ok(Self { config, server, shown: layers.finish()? })
    }
}

/// Returns the layers of this process: the file of `--config` or `LEASEHOLD_CONFIG`, and the environment.
pub(crate) fn layers(global: &Global) -> Settings {
    Settings::of_this_process(global.config.as_deref())
}

/// `config check` and `config show`.
pub(crate) fn config(command: ConfigCommand, global: &Global) -> Result<Exit, Failure> {
    match command {
        // The file alone, so that the answer does not depend on the caller's environment.
        ConfigCommand::Check { file } => check(EffectiveConfig::read(Settings::new().file(&file)).err(), global.json),
        ConfigCommand::Show { file } => {
            let mut layers = Settings::of_this_process(file.as_deref().or(global.config.as_deref()));
            for (key, flag) in [("store", &global.store), ("namespace", &global.namespace)] {
                if let Some(value) = flag {
                    layers = layers.set(key, value.as_str());
                }
            }
            show(&EffectiveConfig::read(layers)?.shown, global.json)
        }
    }
}

fn check(error: Option<ConfigError>, json: bool) -> Result<Exit, Failure> {
    let problems = error.as_ref().map_or(&[][..], ConfigError::problems);
    if json {
        let problem = |problem: &Problem| {
            let mut object = origin(problem.origin());
            object["text"] = json!(problem.text());
            object
        };
        output::json(&problems.iter().map(problem).collect::<Vec<_>>())?;
    } else {
        let line = |problem: &Problem| format!("{}: {}\n", problem.origin(), output::escaped(problem.text()));
        output::data(&problems.iter().map(line).collect::<String>())?;
    }
    if problems.is_empty() {
        output::message("the configuration is valid");
        return Ok(Exit::Done);
    }
    Ok(Exit::Config)
}

fn show(shown: &[Shown], json: bool) -> Result<Exit, Failure> {
    let mut shown: Vec<&Shown> = shown.iter().collect();
    shown.sort_by_key(|shown| (shown.key.contains('.'), &shown.key));
    if json {
        let object = |shown: &&Shown| {
            let mut object = origin(&shown.origin);
            object["key"] = json!(shown.key);
            object["value"] = json!(shown.value);
            object["variable"] = json!(leasehold::config::variable(&shown.key));
            object
        };
        output::json(&shown.iter().map(object).collect::<Vec<_>>())?;
        return Ok(Exit::Done);
    }
    let wide = |length: fn(&Shown) -> usize| shown.iter().map(|shown| length(shown)).max().unwrap_or_default();
    let (key, value) = (wide(|shown| shown.key.len()), wide(|shown| shown.value.chars().count()).min(40));
    let line = |s: &&Shown| format!("{:<key$}  {:<value$}  {}\n", s.key, output::escaped(&s.value), s.origin);
    output::data(&shown.iter().map(line).collect::<String>())?;
    Ok(Exit::Done)
}

/// Describes an origin in JSON.
fn origin(origin: &Origin) -> Value {
    match origin {
        Origin::File { file, line, column } => {
            json!({ "origin": "file", "file": file, "line": line, "column": column })
        }
        Origin::WholeFile(file) => json!({ "origin": "file", "file": file }),
        Origin::Environment(variable) => json!({ "origin": "environment", "from": variable }),
        Origin::Explicit => json!({ "origin": "flag" }),
        _ => json!({ "origin": "default" }),
    }
}

impl From<ConfigError> for Failure {
    /// Lists one mistake per line. A wrong flag is a usage error, a wrong file a configuration error.
    fn from(error: ConfigError) -> Self {
        let by_flag = |problem: &Problem| *problem.origin() == Origin::Explicit;
        let exit = if error.problems().iter().all(by_flag) { Exit::Usage } else { Exit::Config };
        let mut lines = error.problems().iter().map(|problem| match problem.origin() {
            // Every such key has a flag of the same name, except `server.hosts`.
            Origin::Explicit => {
                format!("--{}", problem.text().trim_start_matches("server.").replacen("hosts", "allow-host", 1))
            }
            origin => format!("{origin}: {}", problem.text()),
        });
        let mut failure = Self::new(exit, lines.next().unwrap_or_default());
        failure.details = lines.collect();
        failure
    }
}

//! `keys`: the API keys of `serve`.

use std::path::PathBuf;

use leasehold::store::sqlite;
use leasehold_server::{KeyEntry, KeyError, KeyFile};
use serde_json::json;

use crate::cli::{Global, KeysArgs, KeysCommand};
use crate::config::{self, EffectiveConfig};
use crate::duration;
use crate::exit::{Exit, Failure};
use crate::output;

/// Creates, lists and revokes keys.
pub(crate) fn keys(args: KeysArgs, global: &Global) -> Result<Exit, Failure> {
    let json = global.json;
    let named = match args.file {
        Some(file) => Some(file),
        None => EffectiveConfig::read(config::layers(global))?.server.keys,
    };
    let Some((file, _)) = file(named) else {
        return Err(Failure::new(
            Exit::Config,
            "no location for the key file: set HOME or XDG_STATE_HOME, or use --keys FILE",
        ));
    };
    match args.command {
        KeysCommand::Create { name, role } => {
            let (entry, key) = file.create(&name, role.into()).map_err(key_failure)?;
            let printed = if json {
                let mut object = object(&entry);
                object["key"] = json!(key);
                output::json(&object)?
            } else {
                output::message(&format!("{} key for {}; it is not shown again", entry.role, entry.name));
                output::data(&format!("{key}\n"))?
            };
            if !printed {
                file.revoke(&entry.id).map_err(key_failure)?;
                return Err(Failure::new(Exit::Output, "cannot write the key, so it was revoked"));
            }
        }
        KeysCommand::List => {
            let entries = file.entries().map_err(key_failure)?.unwrap_or_default();
            if json {
                output::json(&entries.iter().map(object).collect::<Vec<_>>())?;
            } else if entries.is_empty() {
                output::message(&format!("there are no keys in {}", file.path().display()));
            } else {
                let line = |e: &KeyEntry| {
                    let made = duration::clock(e.created_ms, 0);
                    format!("{}  {:<8}  {made}  {}\n", e.id, e.role, output::escaped(&e.name))
                };
                output::data(&entries.iter().map(line).collect::<String>())?;
            }
        }
        KeysCommand::Revoke { id } => match file.revoke(&id).map_err(key_failure)? {
            Some(entry) if json => {
                output::json(&object(&entry))?;
            }
            Some(entry) => {
                output::message(&format!("revoked {} of {}; servers notice within a second", entry.id, entry.name));
            }
            None => {
                let text = format!("{} has no key {id}; see leasehold keys list", file.path().display());
                return Err(Failure::new(Exit::Usage, text));
            }
        },
    }
    Ok(Exit::Done)
}

/// Returns the key file, and whether the user chose it. The default is next to the default store.
pub(crate) fn file(named: Option<PathBuf>) -> Option<(KeyFile, bool)> {
    match named {
        Some(path) => Some((KeyFile::new(path), true)),
        None => next_to_default_store("keys.json").map(|path| (KeyFile::new(path), false)),
    }
}

/// Returns the path of a file in the directory of the default store, or `None` if there is no such directory.
pub(crate) fn next_to_default_store(name: &str) -> Option<PathBuf> {
    sqlite::default_path().ok().map(|store| store.with_file_name(name))
}

pub(crate) fn key_failure(error: KeyError) -> Failure {
    let exit = if matches!(error, KeyError::Name) { Exit::Usage } else { Exit::Config };
    Failure::new(exit, format!("{error:#}"))
}

/// Describes a key in JSON, without its hash.
fn object(entry: &KeyEntry) -> serde_json::Value {
    json!({ "id": entry.id, "name": entry.name, "role": entry.role, "created_ms": entry.created_ms })
}

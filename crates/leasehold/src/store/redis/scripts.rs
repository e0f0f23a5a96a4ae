//! The Lua scripts: one file per operation in `lua/`, each with its contract at its head.

use std::sync::LazyLock;

use super::client::{Cmd, OVERSIZED, cmd};
use super::value;
use crate::facts::Fence;
use crate::machine::Limits;

/// A script in the form that the server receives, and its hash.
pub(super) struct Script {
    text: String,
    sha: String,
}

macro_rules! scripts {
    ($($name:ident $file:literal)*) => {
        $(pub(super) static $name: LazyLock<Script> = LazyLock::new(|| Script::compose(include_str!($file)));)*

        /// All scripts. The handshake of a session loads them.
        pub(super) fn all() -> impl Iterator<Item = &'static Script> {
            [$(&*$name),*].into_iter()
        }
    };
}

scripts! {
    ACQUIRE "lua/acquire.lua"
    BIND "lua/bind.lua"
    EVICT "lua/evict.lua"
    FENCE "lua/fence.lua"
    FINISH "lua/finish.lua"
    LEAVE "lua/leave.lua"
    RELEASE_UNCONTENDED "lua/release_uncontended.lua"
    RELEASE_VALUE "lua/release_value.lua"
    ONCE "lua/once.lua"
    RAISE "lua/raise.lua"
    REBIND "lua/rebind.lua"
    RELEASE "lua/release.lua"
    RENEW "lua/renew.lua"
    YIELD "lua/yield.lua"
}

impl Script {
    fn compose(verb: &str) -> Self {
        let Limits { sweep, poll_grace_ms, .. } = Limits::DEFAULT;
        let limits = format!(
            "local SWEEP, POLL_GRACE_MS, FENCE_SANE_MIN, FENCE_MAX, VALUE_MAX = {sweep}, {poll_grace_ms}, {}, {}, {}\n",
            Fence::SANE_MIN,
            Fence::MAX,
            value::SEEN_MAX
        );
        let text = verb
            .replace("--#head\n", include_str!("lua/head.lua"))
            .replace("--#limits\n", &limits)
            .replace("STORED_MAX", &value::STORED_MAX.to_string())
            .replace("TOO_LONG", &format!("'{OVERSIZED}'"));
        // The server keeps the text for ever, so comments are removed.
        let kept = text.lines().filter(|line| !line.trim_start().starts_with("--"));
        let text = kept.fold(String::new(), |all, line| all + line + "\n");
        let sha = sha1_smol::Sha1::from(&text).digest().to_string();
        Self { text, sha }
    }

    /// The command that runs a loaded script by its hash.
    pub(super) fn evalsha(&self) -> Cmd {
        let mut cmd = Cmd::with_capacity("EVALSHA", 512);
        cmd.arg(&self.sha);
        cmd
    }

    /// The command that runs a script by its text and loads it.
    pub(super) fn eval(&self) -> Cmd {
        let mut cmd = Cmd::with_capacity("EVAL", self.text.len() + 512);
        cmd.arg(&self.text);
        cmd
    }

    /// The command that loads the script.
    pub(super) fn load(&self) -> Cmd {
        let mut cmd = cmd("SCRIPT");
        cmd.arg("LOAD").arg(&self.text);
        cmd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_script_is_whole() {
        for script in all() {
            assert!(!script.text.contains("--#"), "{}", script.text);
            assert_eq!(script.sha.len(), 40);
        }
        assert!(RELEASE.text.contains("local function pass_on"));
        assert!(RELEASE.text.find("return 'not ours'") < RELEASE.text.find("local function"), "fast path first");
        assert!(RAISE.text.contains("VALUE_MAX = 200,"));
    }
}

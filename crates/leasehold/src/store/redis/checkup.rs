//! The checkup: whether the server is set up so that locks on it are safe.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::timeout;

use super::RedisStore;
use super::client::{Session, Value, cmd, from_server, number, text, word};
use super::keys;
use crate::clock::{Moment, wall_us};
use crate::facts::Fence;
use crate::store::{Finding, StoreErrorKind};

/// A larger difference between the server's clock and ours is reported.
const CLOCK_APART: Duration = Duration::from_secs(1);
/// A push probe that has not arrived after this counts as lost.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// The commands that locks need, with arguments: `K` is a key, `C` a channel.
const NEEDED: [&str; 39] = [
    "SET K v NX PX 100",
    "GET K",
    "GETRANGE K 0 1",
    "DEL K",
    "INCR K",
    "EXISTS K",
    "TYPE K",
    "PTTL K",
    "PEXPIRE K 100 GT",
    "PERSIST K",
    "SETRANGE K 4 1",
    "SCAN 0",
    "ZADD K 1 m",
    "ZREM K m",
    "ZRANGE K 0 -1",
    "ZSCAN K 0",
    "ZRANK K m",
    "ZSCORE K m",
    "ZPOPMIN K",
    "ZREMRANGEBYSCORE K 0 1",
    "HSET K f v",
    "HGET K f",
    "HDEL K f",
    "HGETALL K",
    "HINCRBY K f 1",
    "EVAL s 1 K",
    "EVALSHA s 1 K",
    "SCRIPT LOAD s",
    "SPUBLISH C m",
    "SSUBSCRIBE C",
    "SUNSUBSCRIBE C",
    "PUBSUB SHARDNUMSUB C",
    "PUBLISH C m",
    "SUBSCRIBE C",
    "WATCH K",
    "MULTI",
    "EXEC",
    "TIME",
    "CLIENT INFO",
];

/// Optional commands, and what is lost without permission for them.
const WANTED: [(&str, &str); 1] = [("CLIENT KILL ID 1", "an attempt that was cut off is given back a little later")];

impl RedisStore {
    pub(super) async fn run_checkup(&self) -> Vec<Finding> {
        let session = match self.client.session().await {
            Ok(session) => session,
            Err(error) => return vec![Finding::bad("reachable", error.to_string())],
        };
        let asked_at = Moment::now();
        if let Err(error) = session.send(&cmd("PING")).await {
            return vec![Finding::bad("reachable", error.to_string())];
        }
        let took = asked_at.until(Moment::now());
        let mut found = Vec::new();
        match info(&session).await {
            Ok(info) => {
                found.push(Finding::ok("reachable", format!("{}, {took:.1?} round trip", server(&info))));
                found.extend([role(&info), eviction(&info), persistence(&info)]);
            }
            Err(why) => {
                found.push(Finding::ok("reachable", format!("{took:.1?} round trip")));
                let text = format!("INFO: {why}. Version, eviction policy and persistence could not be checked");
                found.push(Finding::warn("not checked", text));
            }
        }
        found.extend([
            clock(&session).await,
            self.permissions(&session).await,
            pushes(&session).await,
            fences(&session).await,
        ]);
        found
    }

    async fn permissions(&self, session: &Session) -> Finding {
        let user = match session.send(cmd("ACL").arg("WHOAMI")).await {
            Ok(answer) => text(&answer.reply).unwrap_or_default(),
            Err(error) => return not_checked(&error.to_string()),
        };
        let lock = format!("{}:lock:x", self.keys.namespace().as_str());
        let key = if self.keys.namespace().as_str().is_empty() { "x" } else { lock.as_str() };
        let mut missing = Vec::new();
        for needed in NEEDED {
            match may(session, &user, needed, key, &self.client.inbox_channel).await {
                Ok(true) => {}
                Ok(false) => missing.push(needed.split(' ').next().unwrap_or(needed)),
                Err(why) => return not_checked(&why),
            }
        }
        if !missing.is_empty() {
            let text = format!("user {user} may not {}; see the minimal ACL in docs/protocol.md", missing.join(", "));
            return Finding::bad("permissions", text);
        }
        let mut without = Vec::new();
        for (wanted, lost) in WANTED {
            if let Ok(false) = may(session, &user, wanted, key, &self.client.inbox_channel).await {
                let command = wanted.split(' ').take(2).collect::<Vec<_>>().join(" ");
                without.push(format!("without {command} {lost}"));
            }
        }
        if without.is_empty() {
            return Finding::ok("permissions", format!("user {user} may do all that a lock needs"));
        }
        Finding::warn("permissions", format!("user {user} may do all that a lock needs, but {}", without.join("; ")))
    }
}

fn not_checked(why: &str) -> Finding {
    Finding::warn("permissions", format!("not checked, because ACL WHOAMI and DRYRUN are not permitted ({why})"))
}

/// Whether a user may send a command, checked with ACL DRYRUN.
async fn may(session: &Session, user: &str, command: &str, key: &str, channel: &str) -> Result<bool, String> {
    let mut dry = cmd("ACL");
    dry.arg(["DRYRUN", user]);
    for word in command.split(' ') {
        dry.arg(match word {
            "K" => key,
            "C" => channel,
            word => word,
        });
    }
    match session.send_raw(&dry).await.map_err(|error| error.to_string())?.reply {
        Value::Error(error) => Err(from_server(&error).to_string()),
        reply => Ok(word(&reply) == Some("OK")),
    }
}

async fn info(session: &Session) -> Result<HashMap<String, String>, String> {
    let answer = session.send(&cmd("INFO")).await.map_err(|error| match error.kind() {
        StoreErrorKind::NotPermitted => "the user is not permitted".to_owned(),
        _ => error.to_string(),
    })?;
    let lines = text(&answer.reply).unwrap_or_default();
    let field = |line: &str| line.split_once(':').map(|(name, value)| (name.to_owned(), value.trim().to_owned()));
    Ok(lines.lines().filter_map(field).collect())
}

fn get<'a>(info: &'a HashMap<String, String>, field: &str) -> &'a str {
    info.get(field).map_or("", String::as_str)
}

fn server(info: &HashMap<String, String>) -> String {
    match get(info, "valkey_version") {
        "" => format!("redis {}", get(info, "redis_version")),
        version => format!("valkey {version}"),
    }
}

fn role(info: &HashMap<String, String>) -> Finding {
    match get(info, "role") {
        "master" if get(info, "connected_slaves") != "0" => Finding::warn(
            "role",
            "primary with replicas: a failover may lose the last leases; their holders are notified, and fences keep rising",
        ),
        "master" => Finding::ok("role", "primary"),
        other => Finding::bad("role", format!("{other}: a replica takes no locks; connect to its primary")),
    }
}

fn eviction(info: &HashMap<String, String>) -> Finding {
    let policy = get(info, "maxmemory_policy");
    match (policy, get(info, "maxmemory")) {
        ("noeviction", _) => Finding::ok("eviction", "maxmemory-policy is noeviction"),
        ("", _) => Finding::warn("eviction", "the server does not report its maxmemory-policy; it must be noeviction"),
        (_, "0") => Finding::warn(
            "eviction",
            format!(
                "maxmemory-policy is {policy}; no maxmemory is set, so nothing is dropped yet. Set it to noeviction."
            ),
        ),
        _ => Finding::bad(
            "eviction",
            format!("maxmemory-policy is {policy}: the server may drop held locks. Set it to noeviction."),
        ),
    }
}

fn persistence(info: &HashMap<String, String>) -> Finding {
    let failed = |field: &str| !matches!(get(info, field), "ok" | "");
    if failed("rdb_last_bgsave_status") || failed("aof_last_write_status") {
        let text = "the last save failed: the server refuses writes, or will lose them. See its log and its disk.";
        return Finding::bad("persistence", text);
    }
    match get(info, "aof_enabled") {
        "1" => Finding::ok("persistence", "appendonly yes"),
        _ => Finding::warn(
            "persistence",
            "appendonly no: a restart loses all leases; holders are notified within a third of their ttl.",
        ),
    }
}

async fn clock(session: &Session) -> Finding {
    let before_us = wall_us();
    let reply = match session.send(&cmd("TIME")).await {
        Ok(answer) => answer.reply,
        Err(error) => return Finding::warn("clock", format!("not checked: {error}")),
    };
    let ours_us = before_us.midpoint(wall_us());
    let parts = match &reply {
        Value::Array(parts) => parts.iter().filter_map(number).collect(),
        _ => Vec::new(),
    };
    let [seconds, micros] = parts[..] else {
        return Finding::warn("clock", "not checked: the reply to TIME is invalid");
    };
    let theirs_us = seconds.saturating_mul(1_000_000).saturating_add(micros);
    let apart = Duration::from_micros(theirs_us.abs_diff(ours_us));
    if apart < Duration::from_millis(1) {
        return Finding::ok("clock", "the server and this machine agree to the millisecond");
    }
    let way = if theirs_us > ours_us { "ahead of" } else { "behind" };
    let text = format!("the server is {apart:.1?} {way} this machine");
    if apart > CLOCK_APART {
        let why = "fences after data loss rely on it, and times are shown wrongly. Set both by NTP.";
        return Finding::warn("clock", format!("{text}: {why}"));
    }
    Finding::ok("clock", text)
}

/// Whether pushes arrive. The store sends itself the first push probe as soon as it is connected.
async fn pushes(session: &Session) -> Finding {
    if session.subscribed && timeout(PROBE_TIMEOUT, session.inbox.probe_received(1)).await.is_ok() {
        return Finding::ok("pushes", "a probe to this process arrived");
    }
    let text = "messages do not arrive, so waiters have to poll: permit SSUBSCRIBE, or take the proxy out of the way";
    Finding::warn("pushes", text)
}

async fn fences(session: &Session) -> Finding {
    // Limited to more digits than a fence has: the key may hold anything.
    let mut get = cmd("GETRANGE");
    get.arg(keys::FENCE).arg(0_u64).arg(63_u64);
    let key = keys::FENCE;
    match session.send(&get).await.map(|answer| number(&answer.reply)) {
        Ok(Some(counter)) if counter < Fence::MAX => Finding::ok("fences", format!("the counter stands at {counter}")),
        Ok(Some(counter)) => {
            Finding::bad("fences", format!("{key} is {counter}, above 2^52: nothing is granted. DEL it to begin anew."))
        }
        Ok(None) => Finding::bad("fences", format!("{key} is not a number: nothing is granted. DEL it to begin anew.")),
        Err(error) => Finding::bad("fences", format!("{key}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::finding::Level;

    fn info(fields: &[(&str, &str)]) -> HashMap<String, String> {
        fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_policy_that_drops_locks_is_bad_once_memory_is_limited() {
        let level = |policy, max| eviction(&info(&[("maxmemory_policy", policy), ("maxmemory", max)])).level;
        assert_eq!(level("noeviction", "1000"), Level::Ok);
        assert_eq!(level("volatile-lru", "0"), Level::Warn);
        assert_eq!(level("volatile-lru", "1000"), Level::Bad);
    }

    #[test]
    fn a_save_that_failed_is_bad() {
        let level = |aof, saved| persistence(&info(&[("aof_enabled", aof), ("rdb_last_bgsave_status", saved)])).level;
        assert_eq!(level("1", "ok"), Level::Ok);
        assert_eq!(level("0", "ok"), Level::Warn);
        assert_eq!(level("1", "err"), Level::Bad);
    }
}

use super::*;

/// A file with every key of the two GPU sections.
const WHOLE: &str = include_str!("tests/whole.yaml");
/// An older file, without the keys that were added later.
const OLDER: &str = include_str!("tests/older.yaml");

fn read(text: &str) -> Result<(Config, Vec<Shown>), ConfigError> {
    let mut settings = Settings::new().yaml("locks.yaml", text);
    let config = Config::read(&mut settings);
    settings.finish().map(|shown| (config, shown))
}

/// Returns the problems of a text, one line each.
fn problems(text: &str) -> Vec<String> {
    let error = read(text).expect_err("wrong");
    error.problems().iter().map(|problem| format!("{}: {}", problem.origin(), problem.text())).collect()
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn the_gpu_sections_load_unchanged() {
    for text in [WHOLE, OLDER] {
        let (config, _) = read(text).unwrap_or_else(|error| panic!("{error}"));
        let lock = &config.gpu_lock;
        assert_eq!(
            (lock.poll_interval, lock.max_wait_time, lock.lock_timeout.duration()),
            (secs(2), secs(300), secs(600))
        );
        assert_eq!((lock.max_poll_interval, lock.fallback_timeout), (secs(10), secs(30)));
        assert!(lock.exponential_backoff && lock.use_event_driven);
        let monitor = &config.gpu_lock_monitor;
        assert_eq!(monitor.monitor_interval, secs(30));
        let levels = &monitor.timeout_levels;
        assert_eq!((levels.warning, levels.soft_timeout, levels.hard_timeout), (secs(300), secs(600), secs(900)));
        assert_eq!((monitor.heartbeat.interval, monitor.heartbeat.timeout.duration()), (secs(60), secs(300)));
    }
    let (config, shown) = read(WHOLE).expect("valid");
    let release = &config.gpu_lock.exception_handling;
    assert!(release.enable_emergency_release);
    assert_eq!((release.emergency_release_delay, release.max_release_retries), (secs(5), 3));
    assert!(config.gpu_lock.heartbeat.enabled);
    let monitor = &config.gpu_lock_monitor;
    assert_eq!((monitor.cleanup.max_retry, monitor.cleanup.retry_delay), (3, secs(60)));
    assert!(monitor.enabled && monitor.auto_recovery);
    // The file has each key of the two sections except the two that were added later.
    let later = ["gpu_lock_monitor.evict_living", "gpu_lock_monitor.names"];
    for shown in shown.iter().filter(|shown| shown.key.starts_with("gpu_lock")) {
        assert_eq!(shown.origin == Origin::Default, later.contains(&shown.key.as_str()), "{shown:?}");
    }
    assert!(!monitor.evict_living, "by default a living holder is not evicted");
    let name = |text| crate::LockName::new(text).expect("a name");
    assert!(monitor.names.contains(&name("gpu_lock:0")) && !monitor.names.contains(&name("task_lock:0")));
}

#[test]
fn every_key_of_the_gpu_sections_changes_something() {
    let (config, shown) = read(WHOLE).expect("valid");
    let before = format!("{:?} {:?}", config.gpu_lock, config.gpu_lock_monitor);
    for key in shown.iter().map(|shown| &shown.key).filter(|key| key.starts_with("gpu_lock")) {
        let shown = shown.iter().find(|shown| &shown.key == key).expect("shown");
        let other = match shown.value.as_str() {
            "true" => "false",
            "false" => "true",
            "gpu_lock:*" => "gpu_lock:*, nightly",
            _ if key.ends_with("max_release_retries") || key.ends_with("max_retry") => "4",
            "10s" | "30s" | "60s" => "20s",
            "300s" => "310s",
            "600s" => "610s",
            "2s" => "3s",
            "5s" => "6s",
            _ => "920s",
        };
        let mut settings = Settings::new().yaml("locks.yaml", WHOLE).set(key, other);
        let changed = Config::read(&mut settings);
        settings.finish().unwrap_or_else(|error| panic!("{error}"));
        assert_ne!(format!("{:?} {:?}", changed.gpu_lock, changed.gpu_lock_monitor), before, "{key}");
    }
}

#[test]
fn a_renewing_gpu_lease_is_no_longer_than_the_heartbeat_allows() {
    let (config, _) = read(WHOLE).expect("valid");
    assert_eq!(config.gpu_ttl().duration(), secs(300), "not the lock_timeout of 600");
    let options = config.gpu_options();
    assert_eq!(options.renew_every(config.gpu_ttl()), secs(60));
    // A third of a short lease comes before the heartbeat.
    assert_eq!(options.renew_every(Ttl::new(secs(30)).expect("valid")), secs(10));
    let (config, _) = read("gpu_lock: {heartbeat: {enabled: false}}").expect("valid");
    assert_eq!(config.gpu_ttl().duration(), secs(600));
    let (config, _) = read("gpu_lock_monitor: {heartbeat: {interval: 20, timeout: 120}}").expect("valid");
    assert_eq!(
        config.gpu_ttl().duration(),
        secs(120),
        "the lease of a holder that the monitor counts as dead has ended"
    );
    assert_eq!(config.gpu_options().heartbeat, secs(20));
}

#[test]
fn options_follow_the_file() {
    let text = "namespace: billing\nraw_names: [cron, 'job:*']\nttl: 5s\nowner: till\non_unavailable: open\n\
                answer_within: 250ms\npatience: 3\njournal: off\n\
                gpu_lock: {use_event_driven: false, exponential_backoff: false, fallback_timeout: 7,\n\
                  exception_handling: {enable_emergency_release: false, emergency_release_delay: 1, max_release_retries: 9}}";
    let (config, _) = read(text).unwrap_or_else(|error| panic!("{error}"));
    let options = config.options();
    assert_eq!(options.keys.namespace().as_str(), "billing");
    assert_eq!(options.keys.raw().iter().map(ToString::to_string).collect::<Vec<_>>(), ["cron", "job:*"]);
    assert_eq!((options.ttl.duration(), options.owner.task()), (secs(5), "till"));
    assert_eq!((options.on_unavailable, options.journal), (OnUnavailable::FailOpen, None));
    assert_eq!((options.request_timeout, options.outage_timeout), (Duration::from_millis(250), secs(3)));
    assert_eq!((options.notifications, options.max_release_retries), (true, 3), "GPU settings are for GPU locks");
    let gpu = config.gpu_options();
    assert_eq!((gpu.notifications, gpu.emergency_release, gpu.max_release_retries), (false, false, 9));
    assert_eq!((gpu.poll_interval, gpu.max_poll_interval, gpu.recheck_interval), (secs(2), secs(2), secs(7)));
    assert_eq!((gpu.emergency_release_delay, gpu.on_unavailable), (secs(1), OnUnavailable::FailOpen));
}

#[test]
fn higher_layers_win_and_origins_are_reported() {
    let mut settings = Settings::new()
        .yaml("locks.yaml", "ttl: 20s\nnamespace: file\ngpu_lock:\n  heartbeat:\n    interval: 61\n")
        .variables([("LEASEHOLD_NAMESPACE", "variable"), ("LEASEHOLD_GPU_LOCK_HEARTBEAT_INTERVAL", "62s")])
        .set("gpu_lock.heartbeat.interval", "63s");
    let config = Config::read(&mut settings);
    let shown = settings.finish().expect("valid");
    assert_eq!(config.gpu_lock.heartbeat.interval, secs(63));
    let origin = |key: &str| shown.iter().find(|shown| shown.key == key).expect("shown").origin.to_string();
    assert_eq!(origin("ttl"), "locks.yaml:1:6");
    assert_eq!(origin("namespace"), "LEASEHOLD_NAMESPACE");
    assert_eq!(origin("gpu_lock.heartbeat.interval"), "explicit");
    assert_eq!(origin("patience"), "default");
}

#[test]
fn no_two_keys_share_a_variable() {
    let mut settings = Settings::new();
    let _ = Config::read(&mut settings);
    let shown = settings.finish().expect("defaults are valid");
    let names: std::collections::BTreeSet<String> = shown.iter().map(|shown| variable(&shown.key)).collect();
    assert_eq!(names.len(), shown.len());
    assert!(names.contains("LEASEHOLD_GPU_LOCK_MONITOR_TIMEOUT_LEVELS_HARD_TIMEOUT"));
}

#[test]
fn each_wrong_value_gives_one_clear_line() {
    for (text, line) in [
        (
            "ttl: soon",
            "locks.yaml:1:6: ttl: `soon` is not a duration: write seconds (2, 0.5) or a text such as 500ms, 30s, 5m or 1h30m",
        ),
        ("ttl: 10ms", "locks.yaml:1:6: ttl: ttl 10ms is shorter than 50 ms"),
        ("ttl:", "locks.yaml:1:1: ttl: has no value"),
        ("ttl: [1, 2]", "locks.yaml:1:6: ttl: is a list, but one value is expected"),
        ("ttl: {a: 1}", "locks.yaml:1:1: ttl: is one value, not a section"),
        ("tll: 5s", "locks.yaml:1:1: tll is not known; did you mean ttl?"),
        ("gpu_lock: 5", "locks.yaml:1:11: gpu_lock is a section, not one value"),
        (
            "gpu_lock:\n  heartbeat:\n    intervall: 5",
            "locks.yaml:3:5: gpu_lock.heartbeat.intervall is not known; did you mean gpu_lock.heartbeat.interval?",
        ),
        (
            "gpu_locks:\n  poll_interval: 5\n  b: {c: 1}",
            "locks.yaml:1:1: gpu_locks is not known; did you mean gpu_lock?",
        ),
        ("namespace: a:b", "locks.yaml:1:12: namespace: namespace \"a:b\" must be at most 64 of A-Z a-z 0-9 _ . -"),
        ("on_unavailable: maybe", "locks.yaml:1:17: on_unavailable: `maybe` is neither `closed` nor `open`"),
        (
            "gpu_lock: {exponential_backoff: yes}",
            "locks.yaml:1:33: gpu_lock.exponential_backoff: `yes` is neither true nor false",
        ),
        ("gpu_lock: {poll_interval: 0}", "locks.yaml:1:27: gpu_lock.poll_interval: must be longer than zero"),
        (
            "gpu_lock: {heartbeat: {timeout: 100}}",
            "locks.yaml:1:33: gpu_lock.heartbeat.timeout: must be at least twice the `interval`, so that one late heartbeat does not count as a dead holder",
        ),
        (
            "gpu_lock_monitor: {timeout_levels: {hard_timeout: 1}}",
            "locks.yaml:1:51: gpu_lock_monitor.timeout_levels.hard_timeout: must not come before `soft_timeout`",
        ),
        (
            "gpu_lock_monitor: {timeout_levels: {warning: 700}}",
            "locks.yaml:1:46: gpu_lock_monitor.timeout_levels.soft_timeout: must not come before `warning`",
        ),
        (
            "gpu_lock: {exception_handling: {max_release_retries: -1}}",
            "locks.yaml:1:54: gpu_lock.exception_handling.max_release_retries: `-1` is not a whole number from 0 to 4294967295",
        ),
        (
            "store: somewhere",
            "locks.yaml:1:8: store: not the URL of a store: write sqlite, sqlite:PATH, redis://HOST:PORT, rediss://HOST:PORT or memory",
        ),
        (
            "raw_names: ['*']",
            "locks.yaml:1:12: raw_names: raw pattern \"\" reaches into the keys of namespace \"leasehold\", where two names would share a key; use an empty namespace to make every name raw",
        ),
        (
            "gpu_lock_monitor: {names: ['a*b']}",
            "locks.yaml:1:27: gpu_lock_monitor.names: name \"a*b\" must be a text, with `*` at its end or not at all",
        ),
        ("raw_names: [{a: 1}]", "locks.yaml:1:13: raw_names: a list holds single values"),
        ("ttl: 5s\npatience: 3\nttl: 6s", "locks.yaml:3:1: `ttl` is given twice"),
        (
            "store: sqlite:",
            "locks.yaml:1:14: mapping values are not allowed in this context: a value with a colon at its end, or before a space, needs quotes",
        ),
        ("- ttl", "locks.yaml:1:1: a configuration consists of `key: value` lines"),
        ("just text", "locks.yaml:1:1: a configuration consists of `key: value` lines"),
    ] {
        assert_eq!(problems(text), [line], "{text}");
    }
}

#[test]
fn broken_yaml_is_reported_with_its_place() {
    for text in ["ttl: [1", "ttl: 'x", "a: b: c", "ttl: 5s\n\tpatience: 3"] {
        let found = problems(text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("locks.yaml:") && found[0].split(':').nth(2).is_some_and(|c| c.parse::<u32>().is_ok()),
            "{found:?}"
        );
    }
}

#[test]
fn all_problems_are_reported_at_once_with_their_lines() {
    let error = read("ttl: soon\ntll: 3\npatience: never\n").expect_err("wrong").to_string();
    assert_eq!(
        error,
        "locks.yaml:1:6: ttl: `soon` is not a duration: write seconds (2, 0.5) or a text such as 500ms, 30s, 5m or 1h30m\n  \
           1 | ttl: soon\n    |      ^\n\
         locks.yaml:3:11: patience: `never` is not a duration: write seconds (2, 0.5) or a text such as 500ms, 30s, 5m or 1h30m\n  \
           3 | patience: never\n    |           ^\n\
         locks.yaml:2:1: tll is not known; did you mean ttl?\n  \
           2 | tll: 3\n    | ^"
    );
}

#[test]
fn a_wrong_variable_is_named() {
    let mut settings = Settings::new().variables([
        ("LEASEHOLD_TTL", "soon"),
        ("LEASEHOLD_GPU_LOCK_POL_INTERVAL", "3"),
        ("LEASEHOLD_NAME", "set by `leasehold run` for its child"),
    ]);
    let _ = Config::read(&mut settings);
    let error = settings.finish().expect_err("wrong").to_string();
    assert_eq!(
        error,
        "LEASEHOLD_TTL: ttl: `soon` is not a duration: write seconds (2, 0.5) or a text such as 500ms, 30s, 5m or 1h30m\n\
         LEASEHOLD_GPU_LOCK_POL_INTERVAL: no setting has this name; did you mean LEASEHOLD_GPU_LOCK_POLL_INTERVAL?"
    );
}

#[test]
fn a_key_may_have_a_second_variable() {
    let of = |variables: &[(&'static str, &'static str)]| {
        let mut settings = Settings::new().variables(variables.iter().copied());
        settings.also("server.listen", "LEASEHOLD_LISTEN");
        let listen = settings.get("server.listen", "here".to_owned());
        (listen, settings.finish().expect("valid")[0].origin.to_string())
    };
    let (second, own) = (("LEASEHOLD_LISTEN", "there"), ("LEASEHOLD_SERVER_LISTEN", "elsewhere"));
    assert_eq!(of(&[]), ("here".into(), "default".into()));
    assert_eq!(of(&[second]), ("there".into(), "LEASEHOLD_LISTEN".into()));
    assert_eq!(of(&[second, own]), ("elsewhere".into(), "LEASEHOLD_SERVER_LISTEN".into()));
}

#[test]
fn an_overridden_value_is_checked_too() {
    let mut settings = Settings::new().yaml("locks.yaml", "ttl: soon").set("ttl", "5s");
    let _ = Config::read(&mut settings);
    assert!(settings.finish().is_err());
}

#[cfg(feature = "redis")]
#[test]
fn secrets_are_not_repeated() {
    for text in [
        "store: redis://u:hunter2@h\ntll: 1",
        "store: [redis://u:hunter2@h]",
        "store: REDIS://u:hunter2@h",
        "api_key: hunter2",
        "store: redis://u:hunter2@h: x",
    ] {
        let error = read(text).expect_err("wrong");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
    }
    let (config, shown) = read("store: redis://u:hunter2@h").expect("valid");
    assert!(!format!("{config:?} {shown:?}").contains("hunter2"));
    assert_eq!(config.store.reveal(), "redis://u:hunter2@h");
}

#[test]
fn a_file_is_read_from_disk_and_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("locks.yaml");
    let missing = Config::load(Some(&path)).expect_err("no such file").to_string();
    assert!(missing.contains("locks.yaml: cannot be read: "), "{missing}");
    std::fs::write(&path, "ttl: 7s\nserver:\n  listen: 127.0.0.1:0\nalerts: {x: 1}\n").expect("written");
    let config = Config::load(Some(&path)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(config.ttl.duration(), secs(7), "the server's sections are ignored");
    std::fs::write(&path, "ttl: never\n").expect("written");
    let error = Config::load(Some(&path)).expect_err("wrong").to_string();
    assert!(error.contains("locks.yaml:1:6: ttl: "), "{error}");
}

#[test]
fn an_empty_file_changes_nothing() {
    for text in ["", "# nothing\n", "gpu_lock:\n", "---\n"] {
        let (config, _) = read(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        assert_eq!(config.ttl, Ttl::default());
    }
}

#[tokio::test]
async fn a_configuration_makes_a_manager_and_a_gpu_request() {
    let (config, _) = read("store: memory\njournal: off\nowner: tts\n").expect("valid");
    let locks = LockManager::connect_with(config.store.reveal(), config.gpu_options()).await.expect("memory");
    let guard = config.gpu_request(&locks, 0).await.expect("free");
    let holder = locks.holder("gpu_lock:0").await.expect("answers").expect("held");
    assert_eq!((holder.owner.task(), holder.ttl), ("tts", Some(secs(300))));
    // The wait limit can be replaced: this request does not wait.
    assert!(config.gpu_request(&locks, 0).no_wait().optional().await.expect("answers").is_none());
    guard.release().await.expect("answers");
}

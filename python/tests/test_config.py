"""The configuration: the same file, variables and errors as for the command and the server."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from conftest import SOON, Background, Server, run_python, until

import leasehold
from leasehold import Client, InvalidArgument, _config, _task_settings, gpu, task_lock
from leasehold._gpu_settings import _configured, client_of
from leasehold.celery import _store

#: A file with every key of GPU locks.
YAML = """
gpu_lock:
  poll_interval: 2
  max_wait_time: 300
  lock_timeout: 600
  exponential_backoff: true
  max_poll_interval: 10
  use_event_driven: true
  fallback_timeout: 30
  exception_handling:
    enable_emergency_release: true
    emergency_release_delay: 5
    max_release_retries: 3
  heartbeat:
    enabled: true
    interval: 60
    timeout: 300

gpu_lock_monitor:
  monitor_interval: 30
  timeout_levels:
    warning: 300
    soft_timeout: 600
    hard_timeout: 900
  heartbeat:
    interval: 60
    timeout: 300
  cleanup:
    max_retry: 3
    retry_delay: 60
  enabled: true
  auto_recovery: true
"""


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    yield
    _config._file = None
    _configured.__init__()  # type: ignore[misc]
    _task_settings._settings = None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yml"


def test_a_complete_file_loads(file: Path) -> None:
    file.write_text(YAML)
    leasehold.configure(file)
    now = gpu.settings()
    assert (now.max_wait_time, now.lock_timeout, now.ttl) == (300, 600, 300)
    assert (now.heartbeat.enabled, now.heartbeat.interval, now.heartbeat.timeout) == (True, 60, 300)
    other = YAML.replace("max_wait_time: 300", "max_wait_time: 5")
    file.write_text(other.replace("    timeout: 300\n  cleanup", "    timeout: 120\n  cleanup"))
    leasehold.configure(file)
    assert gpu.settings().max_wait_time == 5 and gpu.settings().ttl == 120, "read anew; the monitor's counts, too"


def test_arguments_override_the_environment_which_overrides_the_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(f"store: sqlite:{tmp_path / 'file.db'}\nnamespace: filed\nttl: 20s\nowner: nightly\n")
    with leasehold.connect(config=file) as client, client.lock("a") as guard:
        assert client.store == f"sqlite:{tmp_path / 'file.db'}"
        assert 19 < guard.time_left <= 20
        holder = client.holder("a")
        assert holder is not None and (holder.owner or "").startswith("nightly@")
        monkeypatch.setenv("LEASEHOLD_NAMESPACE", "of-the-environment")
        with leasehold.connect(config=file) as other:
            assert not other.is_locked("a"), "the environment wins over the file"
        with leasehold.connect(config=file, namespace="filed", ttl=5) as same:
            assert same.is_locked("a"), "an argument overrides both"
            with same.lock("b") as short:
                assert short.time_left <= 5
    monkeypatch.setenv("LEASEHOLD_CONFIG", str(file))
    monkeypatch.setenv("LEASEHOLD_STORE", f"sqlite:{tmp_path / 'environment.db'}")
    with leasehold.connect() as client:
        assert client.store == f"sqlite:{tmp_path / 'environment.db'}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttl: soon\n", "config.yml:1:6: ttl: `soon` is not a duration"),
        ("gpu_lock:\n  pol_interval: 2\n", "did you mean gpu_lock.poll_interval?"),
        ("gpu_lock:\n  heartbeat:\n    interval: -1\n", "config.yml:3:15: gpu_lock.heartbeat.interval"),
        ("gpu_lock:\n  exception_handling: 3\n", "gpu_lock.exception_handling is a section"),
        ("ttl: 1s\nttl: 2s\n", "ttl"),
        ("[", "config.yml"),
    ],
)
def test_an_error_names_its_place(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    for load in (lambda: leasehold.configure(file), lambda: leasehold.connect("memory:", config=file)):
        with pytest.raises(InvalidArgument) as refused:
            load()
        assert message in str(refused.value)
    assert _config._file is None, "nothing was taken from it"


def test_a_missing_file(file: Path) -> None:
    with pytest.raises(InvalidArgument, match="config.yml: cannot be read"):
        leasehold.configure(file)


def test_an_invalid_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEHOLD_GPU_LOCK_HEARTBEAT_INTERVAL", "often")
    with pytest.raises(InvalidArgument, match="LEASEHOLD_GPU_LOCK_HEARTBEAT_INTERVAL: .*`often` is not a duration"):
        gpu.settings()


def test_a_password_in_a_file_is_not_repeated(file: Path) -> None:
    file.write_text("store: redis://u:hunter2@127.0.0.1:1\nttl: soon\n")
    with pytest.raises(InvalidArgument) as refused:
        leasehold.configure(file)
    assert "hunter2" not in str(refused.value)


def test_gpu_locks_poll_and_renew_as_configured(server: Server, redis_url: str, file: Path) -> None:
    file.write_text("gpu_lock:\n  use_event_driven: false\n  lock_timeout: 20\n  heartbeat:\n    interval: 0.3\n")
    gpu.configure(redis_url, config=file)
    with gpu.hold(0) as mine:
        waiter = Background(lambda: gpu.hold(0, max_wait_time=SOON).__enter__())
        until(lambda: bool(client_of().info("gpu_lock:0").waiters))
        assert server.redis.hlen("lh1:polls:gpu_lock:0") == 1, "it polls"
        # By default a lease of 20 s is renewed after seven.
        time.sleep(2)
        assert server.redis.pttl("gpu_lock:0") > 18_500
        assert mine.guard.is_valid
    waiter.join()
    client_of().close()


def test_a_failed_release_is_handled_as_configured(own_server: Server, file: Path) -> None:
    file.write_text(
        "answer_within: 0.2\npatience: 0.2\n"
        "gpu_lock:\n  exception_handling:\n    enable_emergency_release: false\n    max_release_retries: 0\n"
    )
    gpu.configure(own_server.url, config=file)
    manager = gpu.SmartGpuLockManager()
    assert manager.acquire_lock("task-1", "gpu_lock:0")
    own_server.stop()
    assert manager.release_lock("task-1", "gpu_lock:0") is False
    # Without retries and fallbacks, the release is written to the journal at once.
    until(lambda: manager.get_statistics()["journalled_releases"] == 1, within=2)


def test_task_locks_and_tasks_use_the_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"sqlite:{tmp_path / 'tasks.db'}"
    file.write_text(f"store: {store}\non_unavailable: closed\n")
    leasehold.configure(file)
    assert task_lock.acquire_task_lock("task_lock:1")
    with leasehold.connect(store) as client:
        assert client.is_locked("task_lock:1")
    assert _task_settings.task_settings().on_unavailable == "closed"
    assert task_lock.release_task_lock("task_lock:1")
    assert _store(Celery("shop", broker="memory://")) == store
    assert client_of().store is None and client_of()._native.connect().wait() is None and client_of().store == store


def test_a_spawned_process_uses_the_same_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(f"store: sqlite:{tmp_path / 'file.db'}\nttl: 20s\n")
    monkeypatch.chdir(tmp_path)
    leasehold.configure("config.yml")
    with leasehold.connect() as client:
        code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).lock('a').acquire().time_left)"
        left = float(run_python(code, pickle.dumps(client).hex()))
        assert 15 < left <= 20


def test_threads_use_locks_before_anything_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEHOLD_STORE", "memory:")
    found: list[Client] = []
    threads = [threading.Thread(target=lambda: found.append(client_of())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(client) for client in found}) == 1

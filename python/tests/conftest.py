"""Shared fixtures: a real redis-server, a SQLite file, other processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

import leasehold

#: Not a test file: tests start it as a program.
collect_ignore = ["celery_app.py"]

#: A generous timeout in seconds, which only failing tests reach.
SOON = 10.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="repeat as often as was promised, not only some times")


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session", autouse=True)
def _journal(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps the journal of the tests out of the user's state directory."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Server:
    """A redis-server on a free port."""

    def __init__(self, directory: Path, *more: str) -> None:
        self.directory = directory
        self.more = more
        for _ in range(5):
            self.port = free_port()
            if self.start():
                return
        raise AssertionError((directory / "server.log").read_text())

    def start(self) -> bool:
        """Starts the server, or restarts it on the same port."""
        program = os.environ.get("LEASEHOLD_TEST_SERVER") or shutil.which("redis-server")
        assert program, "redis-server is needed"
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.directory)]
        with open(self.directory / "server.log", "ab") as log:
            self.process = subprocess.Popen([program, *arguments, *self.more], stdout=log, stderr=log)
        self.redis = redis.Redis(port=self.port, protocol=2)
        return self._is_up()

    def _is_up(self) -> bool:
        end = time.monotonic() + SOON
        while self.process.poll() is None and time.monotonic() < end:
            try:
                return bool(self.redis.ping())
            except redis.ConnectionError:
                time.sleep(0.01)
        return False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.redis.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server for one test, which may stop it."""
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def redis_url(server: Server) -> str:
    server.redis.flushall()
    return server.url


@pytest.fixture(params=["redis", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'locks.db'}"
    return str(request.getfixturevalue("redis_url"))


@pytest.fixture
def client(url: str) -> Iterator[leasehold.Client]:
    with leasehold.connect(url, owner="test") as client:
        yield client


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[leasehold.Client]:
    with leasehold.connect(redis_url, owner="test") as client:
        yield client


def until(true: Callable[[], bool], within: float = SOON, unless: type[Exception] | tuple[()] = ()) -> None:
    """Waits until a condition is true."""
    end = time.monotonic() + within
    while True:
        try:
            if true():
                return
        except unless:
            pass
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.005)


class Background:
    """Runs work in a thread; `join` raises its exception."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def join(self, within: float = SOON) -> None:
        self._thread.join(within)
        assert not self._thread.is_alive(), "the thread hangs"
        if self._error is not None:
            raise self._error


def start_python(code: str, *arguments: str, stdin: int | None = None) -> subprocess.Popen[str]:
    """Starts another Python, as a user would."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_python(code: str, *arguments: str, within: float = 60.0) -> str:
    """Runs another Python to its end and returns its output."""
    with start_python(code, *arguments) as process:
        try:
            out, err = process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"the program hangs; its output:\n{out}\n{err}") from None
    assert process.returncode == 0, f"exit code {process.returncode}:\n{out}\n{err}"
    return out

"""`rediss://` with a real TLS server: no request is sent to a server whose certificate is not valid for the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
import trustme
from conftest import Background, Server, free_port, until

import leasehold
from leasehold import InvalidArgument, StoreUnavailable
from leasehold.compat import Lock

SECRET = "hunter2-canary"


class Encrypted(NamedTuple):
    server: Server
    port: int
    authority: Path

    def url(self, authority: Path | None = None) -> str:
        return f"rediss://:{SECRET}@127.0.0.1:{self.port}?ca={authority or self.authority}"


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    directory, port = tmp_path_factory.mktemp("tls"), free_port()
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    names = [directory / name for name in ("ca.pem", "cert.pem", "key.pem")]
    authority.cert_pem.write_to_path(str(names[0]))
    certificate.cert_chain_pems[0].write_to_path(str(names[1]))
    certificate.private_key_pem.write_to_path(str(names[2]))
    files = ["--tls-cert-file", str(names[1]), "--tls-key-file", str(names[2])]
    server = Server(directory, "--tls-port", str(port), *files, "--tls-auth-clients", "no")
    server.redis.config_set("requirepass", SECRET)
    yield Encrypted(server, port, names[0])
    server.stop()


def test_locks_over_tls(encrypted: Encrypted) -> None:
    with leasehold.connect(encrypted.url()) as client, leasehold.connect(encrypted.url()) as other:
        assert client.store == f"rediss://127.0.0.1:{encrypted.port}", "without the password"
        guard = client.lock("a").acquire()
        waiter = Background(lambda: other.lock("a", wait=10).acquire().release())
        until(lambda: bool(client.info("a").waiters))
        assert guard.release()
        waiter.join()
        assert not client.is_locked("a")


def test_an_untrusted_server_is_refused(encrypted: Encrypted, tmp_path: Path) -> None:
    strangers = tmp_path / "strangers.pem"
    trustme.CA().cert_pem.write_to_path(str(strangers))
    with pytest.raises(InvalidArgument) as refused:
        leasehold.connect(encrypted.url(strangers))
    assert SECRET not in str(refused.value) and "certificate" in str(refused.value)


def test_plain_text_to_a_port_that_wants_tls(encrypted: Encrypted) -> None:
    with pytest.raises(StoreUnavailable) as refused:
        leasehold.connect(f"redis://:{SECRET}@127.0.0.1:{encrypted.port}", answer_within=1)
    assert SECRET not in str(refused.value)


def test_redis_pys_settings_are_used(encrypted: Encrypted) -> None:
    peer = redis.Redis(
        port=encrypted.port, password=SECRET, ssl=True, ssl_ca_certs=str(encrypted.authority), host="127.0.0.1"
    )
    with Lock(peer, "order:42", timeout=10):
        assert peer.lock("order:42", timeout=10).acquire(blocking=False) is False
    assert peer.lock("order:42", timeout=10).acquire(blocking=False) is True

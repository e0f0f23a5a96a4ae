"""Drives `leasehold serve` with schemathesis, by the document that the server itself gives out.

    python xtask/api_fuzz.py PROGRAM CASES [SEED]

Once on SQLite and once on Redis, with an operator's key. Prints how many requests were sent, how many of the answers
were 5xx, and what did not keep to the document; fails when there is either.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

#: Never ends, so it cannot be answered for; the server's own tests read it.
ENDLESS = "/api/v1/events"
#: Somebody who waits for a lock that is held waits at most so long.
LONGEST_WAIT_MS = 20
#: What is checked. Left out: wrong keys (the server's own tests, which know that it answers 429 to many of them), and
#: what follows resources from one request to the next, which locks are not.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,missing_required_header,unsupported_method"
)
#: A run is divided into rounds, so that it ends soon after it has as many cases as were asked for.
EXAMPLES_A_ROUND = 25
MOST_ROUNDS = 60


def main() -> int:
    program, cases, *rest = sys.argv[1:]
    seed = int(rest[0]) if rest else random.randrange(2**32)
    bad = 0
    for kind in ("sqlite", "redis"):
        with tempfile.TemporaryDirectory(prefix="leasehold-fuzz-") as directory:
            bad += drive(kind, program, Path(directory), int(cases) // 2, seed)
    return 1 if bad else 0


def drive(kind: str, program: str, home: Path, cases: int, seed: int) -> int:
    """Sends at least `cases` requests to a server of its own; answers how many rounds found something."""
    began, sent, found = time.monotonic(), Counter[str](), 0
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(redis(home)) if kind == "redis" else f"sqlite:{home}/locks.db"
        environment = os.environ | {"LEASEHOLD_STORE": store, "HOME": str(home), "XDG_STATE_HOME": str(home)}
        make = [program, "keys", "create", "fuzz", "--role", "operator"]
        key = subprocess.run(make, env=environment, check=True, capture_output=True, text=True).stdout.strip()
        url, log = stack.enter_context(serving(program, environment, home))
        for round_ in range(MOST_ROUNDS):
            if sent.total() >= cases:
                break
            ended = schemathesis(url, key, home, seed + round_, first=round_ == 0)
            sent.update(json.loads((home / "answers.json").read_text()))
            found += ended.returncode != 0
            if ended.returncode != 0:
                sys.stdout.write(ended.stdout + ended.stderr)
                break
        said = log.read_text()
        for secret in (key, "panicked"):
            if secret in said:
                print(f"{kind}: the server's log has {'a key' if secret == key else 'a panic'}")
                found += 1
    failures = sum(count for status, count in sent.items() if status >= "500")
    answers = ", ".join(f"{count} × {status}" for status, count in sorted(sent.items()))
    print(
        f"schemathesis on {kind}: {sent.total()} cases in {time.monotonic() - began:.0f} s, {failures} × 5xx, "
        f"{'deviations from the document: see above' if found else '0 deviations from the document'} ({answers}), seed {seed}",
        flush=True,
    )
    return found + failures


def schemathesis(url: str, key: str, home: Path, seed: int, first: bool) -> "subprocess.CompletedProcess[str]":
    phases = "examples,coverage,fuzzing" if first else "fuzzing"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {key}", "--exclude-path", ENDLESS, "--checks", CHECKS]
    command += ["--phases", phases, "--seed", str(seed), "--max-examples", str(EXAMPLES_A_ROUND)]
    command += ["--request-timeout", "20", "--continue-on-failure", "--warnings", "off", "--no-color"]
    command += ["--generation-database", "none", "--suppress-health-check", "all"]
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "api_fuzz_hooks",
        "PYTHONPATH": str(Path(__file__).parent),
        "ANSWERS": str(home / "answers.json"),
        "LONGEST_WAIT_MS": str(LONGEST_WAIT_MS),
    }
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)


@contextlib.contextmanager
def serving(program: str, environment: dict[str, str], home: Path) -> Iterator[tuple[str, Path]]:
    """The server's address, and its log at its most talkative."""
    log = home / "log"
    command = [program, "serve", "--json", "--listen", "127.0.0.1:0"]
    with log.open("w") as errors:
        server = subprocess.Popen(
            command, env=environment | {"RUST_LOG": "trace"}, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert server.stdout
        line = server.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not begin: {log.read_text()}")
        yield json.loads(line)["url"], log
        server.terminate()
        if server.wait(20) != 0:
            raise SystemExit(f"the server ended with {server.returncode}: {log.read_text()[-2000:]}")
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def redis(home: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(home)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if server.poll() is not None:
                raise SystemExit("redis-server ended at once")
            time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())

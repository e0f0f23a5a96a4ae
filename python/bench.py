"""Our locks against redis-py's, on one server, interleaved in one run: `cargo xtask python-bench`.

Both renew nothing and fence nothing: redis-py cannot. The last column is what our default, with a fence and
renewal, comes to.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import redis

import leasehold

#: Many short rounds, one after the other: whatever else the machine does falls on all alike.
ROUNDS = 51
PAIRS = 200
PROCESSES = 8
#: Each time all of them want the lock at once, and each gets it once.
TURNS = {"redis-py": 4, "leasehold": 200}
GREEDY_SECONDS = 2.0

Pair = Callable[[], None]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        port = free_port()
        server = subprocess.Popen(
            [shutil.which("redis-server") or "redis-server", "--port", str(port), "--save", "", "--dir", directory],
            stdout=subprocess.DEVNULL,
        )
        try:
            wait_for(port)
            alone = measure_alone(port)
            turns = measure_turns(port)
            measure_greedy(port)
        finally:
            server.kill()
            server.wait()
    if alone <= 1 or turns < 10:
        sys.exit("slower than promised: more than 1 and at least 10 times redis-py's")


def measure_alone(port: int) -> float:
    """Acquire and release by one thread, nobody else there."""
    peer, ours, full = pairs(port)
    times: dict[str, list[float]] = {"redis-py": [], "leasehold": [], "fenced": []}
    for _ in range(ROUNDS):
        for name, pair in (("redis-py", peer), ("leasehold", ours), ("fenced", full)):
            began = time.perf_counter()
            for _ in range(PAIRS):
                pair()
            times[name].append((time.perf_counter() - began) / PAIRS * 1e6)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["redis-py"] / medians["leasehold"]
    print(f"acquire + release, one thread, median of {ROUNDS} interleaved rounds of {PAIRS}")
    print(f"  redis-py {medians['redis-py']:.0f} µs · leasehold {medians['leasehold']:.0f} µs: {ratio:.2f} times as fast")
    print(f"  leasehold with fence and renewal {medians['fenced']:.0f} µs: {medians['redis-py'] / medians['fenced']:.2f}")
    return ratio


def measure_turns(port: int) -> float:
    """Eight processes want one lock at once, again and again, and each of them has its turn."""
    rates = {name: [turns(name, port, TURNS[name]) for _ in range(3)] for name in ("redis-py", "leasehold")}
    peer, ours = (statistics.median(rates[name]) for name in ("redis-py", "leasehold"))
    print(f"{PROCESSES} processes want one lock at once, each gets it once, then again; median of 3")
    print(f"  redis-py {peer:.0f} cycles/s · leasehold {ours:.0f} cycles/s: {ours / peer:.1f} times as many")
    return ours / peer


def measure_greedy(port: int) -> None:
    """Each process takes the lock again as soon as it gave it back: who gets it, and how often?"""
    print(f"{PROCESSES} processes take one lock again as soon as they gave it back, {GREEDY_SECONDS:.0f} s")
    for name in ("redis-py", "leasehold"):
        counts, handed_over = greedy(name, port)
        total = sum(counts)
        print(
            f"  {name:<9} {total / GREEDY_SECONDS:6.0f} cycles/s, {handed_over / GREEDY_SECONDS:6.0f} of them after"
            f" another process's; most {max(counts) / total:.0%} and least {min(counts) / total:.0%} by one process"
        )


def pairs(port: int, name: str = "bench") -> tuple[Pair, Pair, Pair]:
    """redis-py's, ours on the same terms, ours by default."""
    peer = redis.Redis(port=port)
    client = leasehold.connect(f"redis://127.0.0.1:{port}")
    theirs = peer.lock(f"peer:{name}", timeout=30)
    ours = client.lock(name, ttl=30, fenced=False, renew=False)
    full = client.lock(name, ttl=30)

    def redis_py() -> None:
        with theirs:
            pass

    def unfenced() -> None:
        with ours:
            pass

    def fenced() -> None:
        with full:
            pass

    return redis_py, unfenced, fenced


def pair_of(name: str, port: int) -> Pair:
    return pairs(port)[0 if name == "redis-py" else 1]


def turns(name: str, port: int, count: int) -> float:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(PROCESSES + 1)
    workers = [context.Process(target=take_turns, args=(name, port, count, barrier)) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    barrier.wait(60)
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    return PROCESSES * count / (time.perf_counter() - began)


def take_turns(name: str, port: int, count: int, barrier: Barrier) -> None:
    """All wait for the last of a round by counting in Redis: a barrier of Python's would cost more than the locks."""
    pair, counter = pair_of(name, port), redis.Redis(port=port)
    pair()
    counter.delete("round")
    barrier.wait(60)
    for at in range(count):
        pair()
        everybody = (at + 1) * PROCESSES
        done = counter.incr("round")
        while done < everybody:
            time.sleep(0.0002)
            done = int(counter.get("round") or 0)


def greedy(name: str, port: int) -> tuple[list[int], int]:
    context = multiprocessing.get_context("spawn")
    barrier, counted = context.Barrier(PROCESSES + 1), context.Queue()
    workers = [context.Process(target=take_again, args=(name, port, barrier, counted)) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    barrier.wait(60)
    counts = [counted.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    return [cycles for cycles, _ in counts], sum(other for _, other in counts)


def take_again(name: str, port: int, barrier: Barrier, counted: Any) -> None:
    marks = redis.Redis(port=port)
    peer = redis.Redis(port=port)
    client = leasehold.connect(f"redis://127.0.0.1:{port}")
    lock: Any = peer.lock("peer:greedy", timeout=30) if name == "redis-py" else client.lock("greedy", ttl=30)
    me = str(os.getpid()).encode()
    cycles = others = 0
    barrier.wait(60)
    end = time.perf_counter() + GREEDY_SECONDS
    while time.perf_counter() < end:
        with lock:
            # Who had it before: one more request, the same for both.
            others += marks.getset("last", me) != me
            cycles += 1
    counted.put((cycles, others))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(port: int) -> None:
    end = time.monotonic() + 10
    while True:
        try:
            redis.Redis(port=port).ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


if __name__ == "__main__":
    main()

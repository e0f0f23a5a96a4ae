"""leasehold's locks against redis-py's, on one server, interleaved in one run: `cargo xtask python-bench`.

With one thread, both run without renewal and fences, which redis-py does not have; a separate line shows leasehold's defaults.
With several processes, leasehold runs with its defaults.
"""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import redis

import leasehold
from leasehold.gpu import SmartGpuLockManager

#: Many short rounds, interleaved, so that other load on the machine affects all of them alike.
ROUNDS = 51
PAIRS = 200
PROCESSES = 8
#: How many turns are measured. In a turn all processes want the lock at once, and each gets it once.
TURNS = {"redis-py": 4, "leasehold": 200}
CONTENDED_SECONDS = 1.5
CONTENDED_ROUNDS = 3
#: A name, the seconds inside the lock, and the seconds between two cycles.
CONTENDED = (
    ("again at once, nothing inside", 0.0, 0.0),
    ("again at once, 1 ms inside", 0.001, 0.0),
    ("again at once, 5 ms inside", 0.005, 0.0),
    ("1 ms inside, 20 ms of other work between", 0.001, 0.020),
)
ALL_DONE = (10, 200)

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
            measure_compared_release(port)
            turns = measure_turns(port)
            measure_contended(port)
            measure_all_done(port)
        finally:
            server.kill()
            server.wait()
    if alone <= 1 or turns < 10:
        sys.exit("slower than promised: more than 1 and at least 10 times redis-py's")


def measure_alone(port: int) -> float:
    """Acquire and release in one thread, without contention."""
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


def measure_compared_release(port: int) -> None:
    """The cost of comparing the holder when an older client's GPU lock is released: a SET and a release, against a SET and a
    DEL."""
    peer, manager = redis.Redis(port=port), SmartGpuLockManager(leasehold.connect(f"redis://127.0.0.1:{port}"))
    # The release of another client's lock may log a warning.
    logging.disable(logging.WARNING)

    def compared() -> None:
        peer.set("gpu_lock:0", "locked_by_task", ex=60)
        assert manager.release_lock("task", "gpu_lock:0", "normal")

    def plain() -> None:
        peer.set("gpu_lock:0", "locked_by_task", ex=60)
        peer.delete("gpu_lock:0")

    times: dict[Pair, list[float]] = {compared: [], plain: []}
    for _ in range(ROUNDS):
        for pair in times:
            began = time.perf_counter()
            for _ in range(PAIRS):
                pair()
            times[pair].append((time.perf_counter() - began) / PAIRS * 1e6)
    logging.disable(logging.NOTSET)
    script, delete = (statistics.median(times[pair]) for pair in (compared, plain))
    print(f"SET and a compared release {script:.0f} µs · SET and DEL {delete:.0f} µs: {script / delete - 1:+.0%}")


def measure_turns(port: int) -> float:
    """Eight processes want one lock at once, again and again, and each gets it once per turn."""
    rates = {name: [turns(name, port, TURNS[name]) for _ in range(3)] for name in ("redis-py", "leasehold")}
    peer, ours = (statistics.median(rates[name]) for name in ("redis-py", "leasehold"))
    print(f"{PROCESSES} processes want one lock at once; when each has had it once, all want it again; median of 3")
    print(f"  redis-py {peer:.0f} cycles/s · leasehold {ours:.0f} cycles/s: {ours / peer:.1f} times as many")
    return ours / peer


def measure_contended(port: int) -> None:
    """Eight processes that want one lock all the time: how often each gets it, and how long it waits."""
    print(
        f"{PROCESSES} processes want one lock all the time, {CONTENDED_SECONDS} s, median of {CONTENDED_ROUNDS} interleaved"
        " rounds.\n  redis-py's waiters poll ten times a second: a process that releases the lock and wants it again at once"
        " finds it\n  free, and keeps it while the others sleep. leasehold passes it to the next waiter every time."
    )
    for what, inside, between in CONTENDED:
        runs: dict[str, list[tuple[list[int], list[float]]]] = {"redis-py": [], "leasehold": []}
        floors: list[float] = []
        for _ in range(CONTENDED_ROUNDS):
            for name, found in runs.items():
                found.append(contended(name, port, inside, between))
            if not inside and not between:
                floors.append(hand_around(port))
        print(what)
        rates = {name: statistics.median(sum(counts) / CONTENDED_SECONDS for counts, _ in runs[name]) for name in runs}
        for name, found in runs.items():
            counts = [count for counts, _ in found for count in counts]
            waits = sorted(wait for _, waits in found for wait in waits)
            print(
                f"  {name:<9} {rates[name]:6.0f} cycles/s; by one process least {min(counts)}, most {max(counts)};"
                f" waited: median {percentile(waits, 50):.1f} ms, p99 {percentile(waits, 99):.0f} ms,"
                f" longest {waits[-1] * 1e3:.0f} ms"
            )
        print(f"  ratio {rates['leasehold'] / rates['redis-py']:.2f}")
        if floors:
            print_ceiling(rates["redis-py"], rates["leasehold"], statistics.median(floors))


def print_ceiling(peer: float, ours: float, ceiling: float) -> None:
    print(
        f"  the upper bound for hand-offs on this machine: {ceiling:.0f}/s, by {PROCESSES} processes with plain Python sockets"
        f"\n  that pass a message on through the server, without a lock, a reply or a second request."
        f"\n  That is {ceiling / peer:.1f} times redis-py's cycles/s; leasehold reaches {ours / ceiling:.0%} of it"
    )


def measure_all_done(port: int) -> None:
    """The time until each of eight processes has had the lock a given number of times."""
    for cycles in ALL_DONE:
        times = {name: all_done(name, port, cycles) for name in ("redis-py", "leasehold")}
        print(
            f"until each of {PROCESSES} processes has had it {cycles} times: redis-py {times['redis-py']:.2f} s ·"
            f" leasehold {times['leasehold']:.2f} s: {times['redis-py'] / times['leasehold']:.2f} times as fast"
        )


def percentile(waits: list[float], percent: int) -> float:
    """A percentile of sorted seconds, in milliseconds."""
    return waits[min(len(waits) - 1, len(waits) * percent // 100)] * 1e3


def pairs(port: int, name: str = "bench") -> tuple[Pair, Pair, Pair]:
    """redis-py's lock, leasehold's with the same terms, leasehold's with its defaults."""
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
    """Ends each round with a counter in Redis, because a Python barrier would cost more than the locks."""
    pair, counter = pair_of(name, port), redis.Redis(port=port)
    pair()
    counter.delete("round")
    barrier.wait(60)
    for at in range(count):
        pair()
        all_done_at = (at + 1) * PROCESSES
        done = counter.incr("round")
        while done < all_done_at:
            time.sleep(0.0002)
            done = int(counter.get("round") or 0)


def contended(name: str, port: int, inside: float, between: float) -> tuple[list[int], list[float]]:
    """The cycles of each process, and all waits, sorted."""
    context = multiprocessing.get_context("spawn")
    barrier, counted = context.Barrier(PROCESSES + 1), context.Queue()
    arguments = (name, port, inside, between, barrier, counted)
    workers = [context.Process(target=take_again, args=arguments) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    barrier.wait(60)
    counts = [counted.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    return [cycles for cycles, _ in counts], sorted(wait for _, waits in counts for wait in waits)


def take_again(name: str, port: int, inside: float, between: float, barrier: Barrier, counted: Any) -> None:
    lock = contended_lock(name, port)
    waits: list[float] = []
    cycles = 0
    barrier.wait(60)
    end = time.perf_counter() + CONTENDED_SECONDS
    while (asked := time.perf_counter()) < end:
        with lock:
            entered = time.perf_counter()
            waits.append(entered - asked)
            # A process that waits at the end gets the lock later, which counts as a wait and not as a cycle.
            cycles += entered < end
            if inside:
                time.sleep(inside)
        if between:
            time.sleep(between)
    counted.put((cycles, waits))


def all_done(name: str, port: int, cycles: int) -> float:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(PROCESSES + 1)
    workers = [context.Process(target=take_often, args=(name, port, cycles, barrier)) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    barrier.wait(60)
    began = time.perf_counter()
    # The workers meet at the barrier again when they are done.
    barrier.wait(300)
    took = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return took


def take_often(name: str, port: int, cycles: int, barrier: Barrier) -> None:
    lock = contended_lock(name, port)
    barrier.wait(60)
    for _ in range(cycles):
        with lock:
            pass
    barrier.wait(300)


def hand_around(port: int) -> float:
    """How many times per second processes can pass a message on through the server, each to the next."""
    context = multiprocessing.get_context("spawn")
    barrier, counted = context.Barrier(PROCESSES), context.Queue()
    workers = [context.Process(target=pass_on, args=(at, port, barrier, counted)) for at in range(PROCESSES)]
    for worker in workers:
        worker.start()
    passed: int = sum(counted.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    return passed / CONTENDED_SECONDS


def pass_on(at: int, port: int, barrier: Barrier, counted: Any) -> None:
    with socket.create_connection(("127.0.0.1", port)) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Not `settimeout`, with which Python makes two system calls per operation.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1, 0))
        server.sendall(command("HELLO", "3"))
        server.sendall(command("SSUBSCRIBE", f"{{ring}}{at}"))
        heard = b""
        while not (b"ssubscribe" in heard and heard.endswith(b":1\r\n")):
            heard += server.recv(65536)
        # From here on the server sends only messages.
        server.sendall(command("CLIENT", "REPLY", "OFF"))
        message = command("SPUBLISH", f"{{ring}}{(at + 1) % PROCESSES}", "go")
        barrier.wait(60)
        passed = 0
        end = time.perf_counter() + CONTENDED_SECONDS
        if at == 0:
            server.sendall(message)
        try:
            while time.perf_counter() < end:
                server.recv(65536)
                server.sendall(message)
                passed += 1
        except BlockingIOError:
            # The process before this one stopped first.
            pass
        counted.put(passed)


def command(*words: str) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word.encode()) for word in words)


def contended_lock(name: str, port: int) -> Any:
    if name == "redis-py":
        return redis.Redis(port=port).lock("peer:contended", timeout=30)
    return leasehold.connect(f"redis://127.0.0.1:{port}").lock("contended", ttl=30)


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

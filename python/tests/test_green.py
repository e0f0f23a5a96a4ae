"""gevent and eventlet: a waiting greenlet does not block the others."""

from __future__ import annotations

import json

import pytest
from conftest import run_python

GEVENT = """
import gevent.monkey; gevent.monkey.patch_all()
import gevent, json, sys, time
import leasehold
spawn, sleep, kill = gevent.spawn, gevent.sleep, gevent.kill
def join(greenlets): gevent.joinall(greenlets, raise_error=True)
"""
EVENTLET = """
import warnings; warnings.simplefilter("ignore")
import eventlet; eventlet.monkey_patch()
import json, sys, time
import leasehold
spawn, sleep, kill = eventlet.spawn, eventlet.sleep, eventlet.kill
def join(greenlets):
    for greenlet in greenlets: greenlet.wait()
"""

TWO_ON_ONE_LOCK = """
client = leasehold.connect(sys.argv[1])
result = {"ticks": 0}
began = time.monotonic()

def holder():
    with client.lock("a"):
        result["holder"] = time.monotonic() - began
        sleep(1)

def waiter():
    sleep(0.1)
    with client.lock("a") as guard:
        result["waiter"] = time.monotonic() - began

def ticks():
    while "waiter" not in result:
        result["ticks"] += 1
        sleep(0.01)

join([spawn(holder), spawn(waiter), spawn(ticks)])
print(json.dumps(result))
"""

MANY_ON_ONE_LOCK = """
client = leasehold.connect(sys.argv[1])
lock = client.lock("a")
inside, done = 0, 0

def work():
    global inside, done
    for _ in range(5):
        with lock as guard:
            inside += 1
            assert inside == 1, "two holders at once"
            sleep(0)
            inside -= 1
            done += 1

join([spawn(work) for _ in range(50)])
print(json.dumps({"done": done, "held": len(client.locks())}))
"""

KILLED = """
client = leasehold.connect(sys.argv[1])
with client.lock("a"):
    waiter = spawn(lambda: client.lock("a").acquire())
    while not client.info("a").waiters:
        sleep(0.01)
    kill(waiter)
    end = time.monotonic() + 5
    while client.info("a").waiters and time.monotonic() < end:
        sleep(0.01)
    left = len(client.info("a").waiters)
guard = client.lock("a", wait=5).acquire()
print(json.dumps({"left": left, "free": guard.release()}))
"""

HOGGED = """
client = leasehold.connect(sys.argv[1])
with client.lock("a", ttl=0.3) as guard:
    def hog():
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass
    join([spawn(hog)])
    print(json.dumps({"valid": guard.is_valid}))
"""

green = pytest.mark.parametrize("green", [GEVENT, EVENTLET], ids=["gevent", "eventlet"])


@green
def test_two_greenlets_on_one_lock(url: str, green: str) -> None:
    result = json.loads(run_python(green + TWO_ON_ONE_LOCK, url))
    assert result["holder"] < 0.5
    assert 1 <= result["waiter"] < result["holder"] + 1.2
    assert result["ticks"] > 30, "the other greenlets were blocked"


@green
def test_many_greenlets_on_one_lock(url: str, green: str) -> None:
    assert json.loads(run_python(green + MANY_ON_ONE_LOCK, url)) == {"done": 250, "held": 0}


@green
def test_a_killed_greenlet_keeps_no_lock(url: str, green: str) -> None:
    assert json.loads(run_python(green + KILLED, url)) == {"left": 0, "free": True}


@green
def test_a_lease_is_renewed_while_the_loop_is_blocked(url: str, green: str) -> None:
    assert json.loads(run_python(green + HOGGED, url)) == {"valid": True}

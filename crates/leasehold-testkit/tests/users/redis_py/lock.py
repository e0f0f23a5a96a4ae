"""A redis-py Lock on a key, told what to do line by line: `lock.py PORT KEY`. Answers every line with one."""

import sys

import redis

client = redis.Redis(host="127.0.0.1", port=int(sys.argv[1]))
lock = None


def acquire(timeout, patience):
    """Both in seconds. Timeout 0: a lock without an end. Patience 0: one try."""
    global lock
    lock = client.lock(sys.argv[2], timeout=float(timeout) or None, sleep=0.01)
    if float(patience) == 0:
        got = lock.acquire(blocking=False)
    else:
        got = lock.acquire(blocking_timeout=float(patience))
    return "acquired " + lock.local.token.decode() if got else "refused"


def release():
    try:
        lock.release()
        return "released"
    except redis.exceptions.LockError:
        return "not owned"


def extend(timeout):
    try:
        lock.extend(float(timeout), replace_ttl=True)
        return "extended"
    except redis.exceptions.LockError:
        return "not owned"


def owned():
    return "owned" if lock.owned() else "not owned"


for line in sys.stdin:
    verb, *args = line.split()
    print(globals()[verb](*args), flush=True)

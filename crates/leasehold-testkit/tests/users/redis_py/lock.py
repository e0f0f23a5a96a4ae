"""A redis-py Lock on a key, controlled by lines of input: `lock.py PORT KEY`. Replies to every line with one line."""

import sys

import redis

client = redis.Redis(host="127.0.0.1", port=int(sys.argv[1]))
lock = None


def acquire(timeout, wait):
    """Both in seconds. Timeout 0 means without an expiry, wait 0 means one try."""
    global lock
    lock = client.lock(sys.argv[2], timeout=float(timeout) or None, sleep=0.01)
    if float(wait) == 0:
        got = lock.acquire(blocking=False)
    else:
        got = lock.acquire(blocking_timeout=float(wait))
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

"""What schemathesis does around each request of `api_fuzz.py`."""

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

answers: Counter[str] = Counter()


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Nobody waits for long; what is out of bounds stays so."""
    wait_ms = body.get("wait_ms") if isinstance(body, dict) else None
    if isinstance(wait_ms, int) and 0 <= wait_ms <= 600_000:
        body["wait_ms"] = min(wait_ms, int(os.environ["LONGEST_WAIT_MS"]))
    return body


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    answers[str(response.status_code)] += 1


atexit.register(lambda: Path(os.environ["ANSWERS"]).write_text(json.dumps(answers)))

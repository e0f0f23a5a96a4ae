"""The examples of the guides run, and pass mypy --strict."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in [ROOT / "python/README.md", *sorted(ROOT.glob("docs/*.md"))] if EXAMPLE.search(page.read_text())]


def example(page: Path, directory: Path) -> Path:
    """The examples of a page as one program, with the line numbers of the page."""
    text = page.read_text()
    lines = [""] * (text.count("\n") + 1)
    for found in EXAMPLE.finditer(text):
        first = text.count("\n", 0, found.start(1))
        for at, line in enumerate(found[1].splitlines()):
            lines[first + at] = line
    file = directory / f"of_{page.stem.lower().replace('-', '_')}.py"
    file.write_text("\n".join(lines))
    return file


def test_there_are_guides() -> None:
    assert ROOT / "docs/python.md" in PAGES


#: The examples of `celery.md` are tasks, which a worker runs in `test_celery.py`.
PROGRAMS = [page for page in PAGES if page.name != "celery.md"]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_the_examples_run(page: Path, tmp_path: Path, redis_url: str) -> None:
    file = example(page, tmp_path)
    for store in (f"sqlite:{tmp_path / 'locks.db'}", redis_url):
        environment = {**os.environ, "LEASEHOLD_STORE": store}
        done = subprocess.run(
            [sys.executable, file], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


def test_the_examples_have_types(tmp_path: Path) -> None:
    files = [example(page, tmp_path) for page in PAGES]
    # Celery's decorators have no types.
    mypy = ["mypy", "--config-file", str(ROOT / "python/pyproject.toml"), "--disable-error-code", "untyped-decorator"]
    done = subprocess.run([sys.executable, "-m", *mypy, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


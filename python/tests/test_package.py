"""The metadata and licences of the package."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import leasehold

ROOT = Path(__file__).parents[2]


def test_the_version() -> None:
    assert leasehold.__version__ == metadata.version("leasehold")


def test_the_licences_are_installed_with_it() -> None:
    installed = {Path(file).name: file for file in metadata.files("leasehold") or [] if "licenses" in Path(file).parts}
    assert metadata.metadata("leasehold").get_all("License-File") == sorted(installed)
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        assert installed[name].read_text() == (ROOT / name).read_text()


def test_the_description_has_no_repository_links() -> None:
    about = metadata.metadata("leasehold").json["description"]
    assert isinstance(about, str)
    assert about.strip() == (ROOT / "python/README.md").read_text().strip()
    assert "](" not in about, "a link that leads nowhere"

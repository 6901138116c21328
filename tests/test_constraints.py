"""The pinned versions fit every Python that the package supports."""

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def test_what_is_pinned_installs_on_the_oldest_python_and_each_of_its_releases():
    """A pin that needs 3.11.5 is no candidate on 3.11.2, where pip then looks for others for hours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = Version(project["requires-python"].removeprefix(">=") + ".0")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    checked = 0
    for name, version in pins.items():
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not installed here
        if found.version.split("+")[0] == version.split("+")[0].split(";")[0].strip():
            checked += 1
            assert oldest in SpecifierSet(found.metadata["Requires-Python"] or ""), name
    assert checked > 100

"""The image is built with plain pip. Where this machine's pip is told where packages come from, so is the build's."""

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")


def mounts(work: Path) -> list[str]:
    """Return options of ``podman build``: this machine's pip settings and certificates, and the folders they name.

    Args:
        work: a folder for the settings file.
    """
    settings = configparser.RawConfigParser()
    for section in ("global", "install"):
        settings.add_section(section)
    places: set[Path] = {_BUNDLE} if _BUNDLE.exists() else set()
    for name, value in _read().items():
        section, _, key = name.rpartition(".")
        settings.set("install" if section == "install" else "global", key, value)
        paths = {path for word in value.split() if (path := Path(word.removeprefix("file://"))).is_absolute()}
        places |= {path.parent for path in paths} if key.endswith("index-url") else paths  # its links lead beside it
    written = work / "pip.conf"
    with written.open("w") as stream:
        settings.write(stream)
    shared = [(written, "/etc/pip.conf"), *((path, str(path)) for path in sorted(_outermost(places)))]
    return [word for source, target in shared for word in ("-v", f"{source}:{target}:ro")]


def _read() -> dict[str, str]:
    """Return the settings of pip as it lists them; those of the environment win, as they do for pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=os.environ).stdout
    found = dict(re.findall(r"^([\w.:-]+)='(.*)'$", lines, re.MULTILINE))
    return dict(sorted(found.items(), key=lambda item: item[0].startswith(":env:")))


def _outermost(places: set[Path]) -> list[Path]:
    """Return those that exist and lie in no other."""
    there = {place for place in places if place.exists()}
    return [place for place in there if not any(other in place.parents for other in there)]

"""What the test needs, found out before anything is built."""

import os
import shutil
import subprocess

from tools.container_test.machine import SkippedError, namespaces

PROGRAMS = (
    "podman",
    "buildah",
    "runc",
    "conmon",
    "iptables",
    "ip",
    "mmdebstrap",
    "kubectl",
    "unshare",
    "setpriv",
)
_HELPERS = {
    "netavark": ("/usr/lib/podman/netavark", "/usr/libexec/podman/netavark"),
    "aardvark-dns": ("/usr/lib/podman/aardvark-dns", "/usr/libexec/podman/aardvark-dns"),
    "catatonit": ("/usr/bin/catatonit", "/usr/libexec/podman/catatonit", "/usr/lib/podman/catatonit"),
}


def check() -> None:
    """Return if the test can run here.

    Raises:
        SkippedError: with all that is missing.
    """
    if os.geteuid() != 0:
        raise SkippedError("it makes namespaces and containers: run it as root")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += [name for name, places in _HELPERS.items() if not any(map(os.path.exists, places))]
    if missing:
        raise SkippedError(f"not installed: {', '.join(missing)}; .ci/install-tools containers kubectl installs them")
    made = subprocess.run([*namespaces(network=True), "true"], capture_output=True, text=True, timeout=60)
    if made.returncode != 0:
        raise SkippedError(f"no namespaces can be made here: {made.stderr.strip()}")

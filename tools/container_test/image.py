"""The stage that builds the images and holds them to what they promise."""

import json
import signal
import sys
from pathlib import Path

from tools.container_test import base, hostpip
from tools.container_test.machine import (
    FAILED,
    ROOT,
    SKIPPED,
    SkippedError,
    TestFailedError,
    say,
    settle_in,
    wait_until,
)
from tools.container_test.podman import Podman

BASE, BUILDING, SERVER, QUICKSTART = (
    f"localhost/sparseps-test-{name}:latest" for name in ("base", "building", "server", "quickstart")
)

_BUILD_SECONDS = 1500
_START_SECONDS = 120.0
_MOST_MEGABYTES = 900  # of the server's image, with a torch for CPUs: docs/guide/install.md says what they are
_UNWANTED = "cc c++ gcc g++ clang ld as make cmake ninja pip pip3 strip"  # programs
_SOURCE, _REVISION = "https://example.org/sparseps", "0123abc"  # labels
_SURVEY = f"""
set -eu
for program in {_UNWANTED}; do ! command -v "$program" || exit 3; done
for module in pip ensurepip; do ! python -c "import $module" 2>/dev/null || exit 10; done
found=$(find /opt/sparseps -type d \\( -name tests -o -path '*/torch/include' \\) -o -name '*.a' -o -name protoc)
test -z "$found" || {{ echo "$found"; exit 4; }}
test -z "$(find / -xdev \\( -path '*/.cache/pip' -o -path '/var/lib/apt/lists/*_Packages' \\) 2>/dev/null)" || exit 5
test "$(id -u):$(id -g)" = 10001:10001 || exit 6
! touch /opt/sparseps/written 2>/dev/null || exit 7
touch /data/written /tmp/written || exit 8
test -z "$(find / -xdev -type f -perm /6000 2>/dev/null)" || exit 9
psservice compile; psclient compile
test -z "$(find /tmp -name '*.nb[ci]')" || exit 11
"""
_WRONG = {
    3: "a compiler, a build tool or pip is in it",
    4: "tests, headers or the programs of torch's developers are in it",
    5: "a package manager's cache is in it",
    6: "it does not run as 10001:10001",
    7: "its user can write to its program",
    8: "its user cannot write to /data and /tmp",
    9: "a program runs as its owner",
    10: "Python finds pip, or makes one",
    11: "a loop is compiled again, although the image brings it along",
}
HARDENED = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--no-healthcheck")


def main(work: Path) -> int:
    settle_in()
    podman = Podman(work)
    try:
        for name, for_building in ((BASE, False), (BUILDING, True)):
            podman.run("import", str(base.make(for_building=for_building)), name, seconds=300)
        tried = podman.attempt("run", "--rm", "--network=none", BASE, "true", seconds=120)
        if tried.returncode != 0:
            raise SkippedError(f"podman cannot run a container here: {tried.stderr.strip()}")
        _build(podman, work)
        _survey(podman)
        _check_materials(podman)
        _stop_early(podman)
    except SkippedError as error:
        print(f"container test skipped: {error}", flush=True)
        return SKIPPED
    except TestFailedError as error:
        print(f"container test FAILED: {error}", file=sys.stderr, flush=True)
        return FAILED
    return 0


def _build(podman: Podman, work: Path) -> None:
    options = [
        *("--network=host", "--format=docker", "--pull=never", "--file", str(ROOT / "deploy" / "Containerfile")),
        *("--build-arg", f"BUILD_IMAGE={BUILDING}", "--build-arg", f"BASE_IMAGE={BASE}"),
        *("--build-arg", f"SOURCE={_SOURCE}", "--build-arg", f"REVISION={_REVISION}", *hostpip.mounts(work)),
    ]
    for target, name in (("server", SERVER), ("quickstart", QUICKSTART)):
        say(f"building the image {target}")
        said = podman.run("build", *options, "--target", target, "--tag", name, str(ROOT), seconds=_BUILD_SECONDS)
        sizes = [podman.inspect(image, "image")["Size"] / 1e6 for image in (name, BASE)]
        if name == SERVER and sizes[0] > _MOST_MEGABYTES:
            raise TestFailedError(f"the server's image has {sizes[0]:.0f} MB, and may have {_MOST_MEGABYTES}")
        say(
            f"image {target}: {sizes[0]:.0f} MB, of which the base is {sizes[1]:.0f} MB; "
            f"{said.count('Using cache')} of its steps were there already"
        )


def _survey(podman: Podman) -> None:
    """Look into the server's image, with a root that is only read and without any capability."""
    looked = podman.attempt(
        "run", "--rm", "--network=none", *HARDENED, "--entrypoint=sh", SERVER, "-c", _SURVEY, seconds=300
    )
    if looked.returncode != 0:
        why = _WRONG.get(looked.returncode, "it cannot be looked into")
        raise TestFailedError(f"the server's image: {why}\n{looked.stdout}{looked.stderr}")
    said = podman.run("run", "--rm", "--network=none", *HARDENED, SERVER, "--version", seconds=120).split()[-1]
    labels = podman.inspect(SERVER, "image")["Labels"]
    wanted = {"version": said, "source": _SOURCE, "revision": _REVISION, "licenses": "Apache-2.0"}
    if any(labels.get(f"org.opencontainers.image.{name}") != value for name, value in wanted.items()):
        raise TestFailedError(f"the image is labelled {json.dumps(labels)}, not {json.dumps(wanted)}")
    open_door = podman.attempt("run", "--rm", "--network=none", *HARDENED, SERVER, seconds=120)
    if open_door.returncode != 2 or "--insecure" not in open_door.stderr:
        raise TestFailedError(
            f"without tokens or --insecure the server must not start; status {open_door.returncode}: {open_door.stderr}"
        )
    say(f"version {said}; runs as 10001 on a read-only root without capabilities; no loop is compiled again")
    say("no pip, no compiler, no tests, no caches")


def _check_materials(podman: Podman) -> None:
    """Compare the bill of materials in the image with the distributions that its Python finds."""
    run = ("run", "--rm", "--network=none", *HARDENED)
    bill = json.loads(podman.run(*run, "--entrypoint=cat", SERVER, "/opt/sparseps/sbom.cdx.json", seconds=120))
    script = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    found = set(podman.run(*run, "--entrypoint=python", SERVER, "-c", script, seconds=120).split())
    listed = {f"{each['name']}=={each['version']}" for each in bill["components"]}
    if bill["bomFormat"] != "CycloneDX" or found != listed:
        raise TestFailedError(f"the bill of materials differs from the environment in {sorted(found ^ listed)}")
    say(f"the bill of materials names the {len(found)} distributions that are in the image")


def _stop_early(podman: Podman) -> None:
    """Send SIGTERM while the server is starting, as the first process of its container: it heeds it."""
    name = "early"
    podman.run("run", "--detach", "--name", name, "--network=none", *HARDENED, SERVER, "serve", "--insecure")
    pid = int(podman.inspect(name)["State"]["Pid"])
    wait_until(lambda: _catches(pid, signal.SIGTERM), _START_SECONDS, "the server has a handler for SIGTERM")
    podman.run("kill", "--signal=TERM", name)
    status = int(podman.run("wait", name, seconds=_START_SECONDS))
    podman.run("rm", "--volumes", name)
    if status != 0:
        raise TestFailedError(f"told to stop while it started, the server ended with status {status}")
    say("told to stop while it starts, the server does")


def _catches(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal, or is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) & 1 << (number - 1))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

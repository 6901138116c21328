"""``psclient follow``: a directory that always has the newest version of a run, and a command after each."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from psclient import settings
from psclient.errors import ConfigurationError
from psclient.reader.cut import Cut
from psclient.reader.directory_sink import DirectorySink
from psclient.reader.follower import Follower
from pscore.names import escaped
from pscore.units import human_bytes

_POLL_SECONDS = 0.5


def run(addresses: str, out: Path, command: str, *, once: bool, seconds: float, allow_older: bool) -> int:
    """Follow until the run is over, SIGINT or SIGTERM; with ``once`` until one version is there, at most ``seconds``.

    Returns:
        0, or 1 if following has failed, or nothing came in time.

    Raises:
        SparsepsError: a setting, an address or the directory cannot be used.
        OSError: the directory cannot be written.
    """
    words = shlex.split(command)
    if command and not words:
        raise ConfigurationError("--exec names no command")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    began = time.monotonic()

    def tell(cut: Cut) -> None:
        print(f"version {cut.version} of run {escaped(cut.run_id)}, digest {cut.digest}, in {out}", flush=True)
        if words:
            _execute(words, out, cut)

    with Follower(addresses, DirectorySink(out), settings.load(), allow_older=allow_older, on_cut=tell) as follower:
        while not stop.wait(_POLL_SECONDS if follower.ready or not once else 0.05):
            if follower.finished or (once and follower.ready and follower.lag.versions == 0):
                break
            if follower.is_over or (once and time.monotonic() > began + seconds):
                print(f"psclient: {escaped(str(follower.error or 'no version came in time'))}", file=sys.stderr)
                return 1
        if follower.cut is not None:
            held, fetched = follower.cut, human_bytes(follower.fetched_bytes)
            print(f"version {held.version} is in {out}; {fetched} fetched in {time.monotonic() - began:.0f} s")
    return 0


def _execute(words: list[str], out: Path, cut: Cut) -> None:
    """Run the user's command and wait for it; newer versions are skipped meanwhile."""
    about = {
        "SPARSEPS_DIRECTORY": str(out),
        "SPARSEPS_VERSION": str(cut.version),
        "SPARSEPS_WEIGHT_VERSION": cut.weight_version,
        "SPARSEPS_DIGEST": cut.digest,
    }
    try:
        status = subprocess.run(words, env={**os.environ, **about}, check=False).returncode
    except OSError as error:
        print(f"psclient: {escaped(str(error))}", file=sys.stderr)
        return
    if status:
        print(f"psclient: {escaped(words[0])} has ended with status {status}", file=sys.stderr)

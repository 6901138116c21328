"""``psclient follow``: a directory that always has the newest version of a run, and a command after each."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import torch

from psclient import settings
from psclient.errors import ConfigurationError
from psclient.reader.directory_sink import DirectorySink
from psclient.reader.follower import Follower
from pscore.names import escaped, shown
from pscore.reader.cut import Cut
from pscore.units import human_bytes

DTYPES = {"run": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
_POLL_SECONDS = 0.5


def run(
    addresses: str,
    security: settings.ClientSettings,
    out: str,
    command: str,
    *,
    dtype: str,
    once: bool,
    seconds: float,
    allow_older: bool,
) -> int:
    """Follow until the run is over, SIGINT or SIGTERM; with ``once`` until one version is there, at most ``seconds``.

    Returns:
        0, or 1 if following has failed, or nothing came in time, or with ``once`` the command has failed.

    Raises:
        SparsepsError: a setting, an address, the command or the directory cannot be used.
    """
    words = shlex.split(command)
    if command and (not words or shutil.which(words[0]) is None):
        raise ConfigurationError(f"--exec: there is no program {shown(words[0] if words else command)}")
    stop, made, told = threading.Event(), threading.Event(), threading.Event()
    began, statuses = time.monotonic(), [0]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    def tell(cut: Cut) -> None:
        told.set()
        print(f"version {cut.version} of run {escaped(cut.run_id)}, digest {cut.digest}, in {out}", flush=True)
        if words:
            statuses[0] = _execute(words, out, cut)
        if once and made.wait():
            follower.close()

    follower = Follower(addresses, DirectorySink(out, DTYPES[dtype]), security, allow_older=allow_older, on_cut=tell)
    made.set()
    with follower:
        while not stop.wait(_POLL_SECONDS) and not follower.finished and not follower.is_over:
            if once and not told.is_set() and time.monotonic() > began + seconds:
                break
    if follower.cut is None or (once and not told.is_set()):
        if not follower.is_over or follower.error is None:  # else the log has said it
            what = "version" if follower.cut is None else "other version"
            print(f"psclient: there is no {what} after {time.monotonic() - began:.0f} s", file=sys.stderr)
        if follower.error is not None:
            print(f"psclient: {escaped(str(follower.error))}", file=sys.stderr)
        return 0 if stop.is_set() else 1
    fetched = human_bytes(follower.fetched_bytes)
    print(f"version {follower.cut.version} is in {out}; {fetched} fetched in {time.monotonic() - began:.0f} s")
    return statuses[0] if once else 0


def _execute(words: list[str], out: str, cut: Cut) -> int:
    """Run the user's command and wait for it; newer versions are skipped meanwhile. Return 0, or 1 if it has failed."""
    about = {
        "SPARSEPS_DIRECTORY": os.path.abspath(out),
        "SPARSEPS_VERSION": str(cut.version),
        "SPARSEPS_WEIGHT_VERSION": cut.weight_version,
        "SPARSEPS_DIGEST": cut.digest,
    }
    try:
        status = subprocess.run(words, env={**os.environ, **about}, check=False).returncode
    except OSError as error:
        print(f"psclient: --exec: {escaped(str(error))}", file=sys.stderr)
        return 1
    if status:
        print(f"psclient: --exec: {escaped(words[0])} has ended with status {status}", file=sys.stderr)
    return 1 if status else 0

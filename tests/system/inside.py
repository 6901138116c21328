"""Run a module on a host of :mod:`tests.system.namespaces`, as ``ip netns exec`` does, but as a process that is forked.

``python -m tests.system.inside NAMESPACE MODULE ARGUMENT…``
"""

import ctypes
import os
import runpy
import sys
from pathlib import Path

from tests.system.namespaces import FILES

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 19

_libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace: str) -> None:
    """Take the namespace's network, and its files in ``/etc``."""
    with open(f"/run/netns/{namespace}") as place:
        _call("setns", place.fileno(), _CLONE_NEWNET)
    _call("unshare", _CLONE_NEWNS)
    _call("mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)
    for file in (FILES / namespace).iterdir():
        _call("mount", os.fsencode(file), os.fsencode(Path("/etc") / file.name), None, _MS_BIND, None)


def _call(name: str, *arguments: bytes | int | None) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


if __name__ == "__main__":
    enter(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

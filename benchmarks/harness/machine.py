"""What the figures were measured on and with."""

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

_LIBRARIES = ("torch", "numpy", "grpcio", "protobuf")


def describe(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return command, date, machine, versions and thread counts."""
    return {
        "command": f"python -m {module} {shlex.join(arguments)}".strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "load_average": os.getloadavg(),
        },
        "versions": {
            "sparseps": version("sparseps"),
            "commit": commit(),
            "python": platform.python_version(),
            **{library: version(library) for library in _LIBRARIES},
        },
        "threads": {
            "torch": torch.get_num_threads(),
            "interop": torch.get_num_interop_threads(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
        },
    }


def sentences(facts: dict[str, Any]) -> list[str]:
    """Say the same for a reader."""
    machine, versions = facts["machine"], facts["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("python", *_LIBRARIES))
    tree = versions["commit"] or "no commit"
    return [
        f"`{facts['command']}`, {facts['date']}, sparseps {versions['sparseps']} at {tree}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}, "
        f"load {machine['load_average'][0]:.1f} at the start",
        f"{libraries}; {facts['threads']['torch']} threads in this process",
    ]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def commit() -> str:
    """Return the commit of the tree, with a plus where files differ from it; empty outside of a repository."""
    here = Path(__file__).parent
    try:
        short = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True)
    except OSError:
        return ""
    return short.stdout.strip() + ("+" if short.stdout and changed.stdout.strip() else "")

"""Probes as child processes that use the packages of one checkout, this one or an older one."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_WORDS = 3000
"""Characters of a failure that are shown."""


_INTERNAL = ("replies",)
"""Probes that use the internals of their checkout."""


class ProbeError(Exception):
    """A probe failed, or took too long; the message is the end of what it wrote."""


class Checkout:
    """A directory with psclient, psservice and pscore; a context manager.

    Probes are the modules of ``benchmarks.short_way.probes`` of this checkout. One that uses internals of the packages
    finds those of its own checkout behind the names of that checkout's benchmarks.

    Args:
        root: the directory; the default is this checkout.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        if not (root / "psservice").is_dir():
            raise ProbeError(f"{root} has no folder psservice: give --base the root of a checkout")
        self._root = root.resolve()
        self._here = tempfile.TemporaryDirectory()
        here = Path(self._here.name)
        caches = {"PYTHONPYCACHEPREFIX": str(here / "pycache"), "NUMBA_CACHE_DIR": str(here / "numba")}
        self._caches = {} if self._root == _ROOT else caches  # nothing is written into a base
        (here / "benchmarks").symlink_to(_ROOT / "benchmarks")
        (here / "sitecustomize.py").symlink_to(_ROOT / "benchmarks" / "short_way" / "old_names.py")

    def warm_up(self, seconds: float) -> None:
        """Compile the loops, so that no probe competes with the compiler that a server starts beside it."""
        code = "from pscore.warmup import warm_up; warm_up(); print('{}')"
        self.execute(["-c", code], [self._here.name, str(self._root)], seconds)

    def probe(self, name: str, arguments: dict[str, Any], seconds: float) -> dict[str, float]:
        """Run a probe and return its figures.

        Raises:
            ProbeError: it failed, or did not end in time.
        """
        if name in _INTERNAL:
            script = _ROOT / "benchmarks" / "short_way" / "probes" / f"{name}.py"
            return self.execute([str(script), json.dumps(arguments)], [str(self._root)], seconds)
        command = ["-m", f"benchmarks.short_way.probes.{name}", json.dumps(arguments)]
        return self.execute(command, [self._here.name, str(self._root)], seconds)

    def execute(self, command: Sequence[str], path: Sequence[str], seconds: float) -> dict[str, float]:
        """Run Python with a module path of its own; return the JSON object of its last line."""
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self._here.name,
            env={**os.environ, **self._caches, "PYTHONPATH": os.pathsep.join(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise ProbeError(f"not done after {seconds:.0f} s") from None
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise ProbeError(errors.strip()[-_WORDS:] or f"status {process.returncode}")
        found: dict[str, float] = json.loads(output.splitlines()[-1])
        return found

    def __enter__(self) -> "Checkout":
        """Return it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was set up."""
        self._here.cleanup()

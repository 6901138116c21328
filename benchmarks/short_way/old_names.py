"""The module names of commit 7cc8f91, as aliases: Python imports this file by itself in the processes of a base.

A base's processes see this checkout's benchmarks and the base's packages (``checkout.py``). Other bases need no alias.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

import pscore

_MODULES = {
    "pscore.model.sparse_slice": "pscore.segment",
    "pscore.model": "pscore",
    "pscore.selection": "pscore.selectors",
    "pscore.wire": "pscore",
}


class _Alias(Loader):
    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        if self._name == "pscore.segment":
            module.SparseSlice = module.Segment  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has been executed under its old name."""


class _OldNames(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        for new, old in _MODULES.items():
            if name == new or name.startswith(f"{new}."):
                return ModuleSpec(name, _Alias(old + name.removeprefix(new)), is_package=True)
        return None


if PathFinder.find_spec("wire", pscore.__path__) is None:  # no other finder: an editable install looks elsewhere
    sys.meta_path.insert(0, _OldNames())

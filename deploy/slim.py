"""Makes an environment small enough to ship: ``python deploy/slim.py ENVIRONMENT``, run by the Containerfile.

It removes what no program imports (tests, headers, stubs, static libraries, the programs of torch's developers, the
descriptions of Amazon's services beside those that a store of backups calls) and symbol tables, which only debuggers
read. Then it imports every module of sparseps, so that the byte code of what they import, and of nothing else, lies
beside the sources: in a root that cannot be written, no start compiles it.
"""

import importlib
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OURS = ("pscore", "psservice", "psclient")
ELSEWHERE = {"triton", "vllm"}
"""What modules of ours import that not every image has."""

UNUSED_FOLDERS = (
    *("**/tests", "**/include", "**/__pycache__"),
    *("torch/bin", "torch/lib/libshm", "torch/lib/libshm_windows", "torch/share", "torch/test"),
)
UNUSED_FILES = ("**/*.a", "**/*.pxd", "**/*.pyi", "torch/lib/*_test.so", "torch/lib/libbackend_with_compiler.so")
STRIPPED = ("torch/lib/*.so", "llvmlite/binding/*.so", "cryptography/hazmat/bindings/*.so", "yaml/*.so")
"""Where symbol tables take much. Not all libraries can be stripped: those that auditwheel has patched break."""
USED = ("torch/bin/torch_shm_manager",)
"""Stays, although a pattern names it: torch starts it if tensors are shared by file system."""

SERVICES = {"s3", "sso", "sso-oidc", "sts"}
"""Of botocore: objects, and the ways to get credentials."""


def main(environment: Path) -> int:
    """Make an environment small, and print what each step took away."""
    (packages,) = environment.glob("lib/python3*/site-packages")
    before = _bytes(packages)
    for step in (_remove, _strip, _import_all):
        step(packages)
        after = _bytes(packages)
        print(f"{step.__name__[1:]}: {(after - before) / 1e6:+.0f} MB", flush=True)
        before = after
    print(f"{environment} has {before / 1e6:.0f} MB:")
    for path in sorted(packages.iterdir(), key=_bytes, reverse=True)[:12]:
        print(f"{_bytes(path) / 1e6:8.1f} MB {path.name}")
    return 0


def unused(packages: Path) -> Iterator[Path]:
    """Yield the files and folders that no program imports; a folder, and not what is in it."""
    kept = {packages / name for name in USED}
    for pattern in UNUSED_FOLDERS:
        for folder in packages.glob(pattern):
            if folder.is_dir() and not folder.is_symlink():
                within = [path for path in kept if folder in path.parents]
                yield from (path for path in folder.iterdir() if path not in within) if within else (folder,)
    for pattern in UNUSED_FILES:
        yield from (path for path in packages.glob(pattern) if path.relative_to(packages).parts[0] not in OURS)
    for service in packages.glob("botocore/data/*/"):
        if service.is_dir() and service.name not in SERVICES:
            yield service


def _remove(packages: Path) -> None:
    for path in list(unused(packages)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)  # it was in a folder that is removed


def _strip(packages: Path) -> None:
    files = [str(path) for pattern in STRIPPED for path in packages.glob(pattern)]
    subprocess.run(["strip", "--strip-unneeded", *files], check=True)


def _import_all(packages: Path) -> None:
    """Import every module of ours, with the byte code written whatever the environment says of it.

    Raises:
        ModuleNotFoundError: something is missing that every image must have.
    """
    sys.dont_write_bytecode = False
    for package in OURS:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            try:
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in ELSEWHERE:
                    raise


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.lstat().st_size for file in files if not file.is_dir())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

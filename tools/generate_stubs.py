#!/usr/bin/env python3
"""Regenerate the stubs of proto/ in pscore and psservice, or check that they have not drifted.

    python tools/generate_stubs.py            write the stubs
    python tools/generate_stubs.py --check    compare only; exit status 1 names the files that differ
    python tools/generate_stubs.py --prepare  fetch the generator only

Stubs refuse to load on a gRPC or protobuf runtime older than the generator that wrote them. So the generator is the
oldest release that sparseps supports (see the lower bounds in pyproject.toml), not the newest. Its distribution
forbids newer protobuf runtimes, which the compiler inside it never touches: it is kept in a folder of its own
beside the environment's packages and fetched there on first use. The type stubs are mypy-protobuf's.

Exit status: 0 done or in step, 1 drift, 2 the generator is missing, cannot be fetched, or failed.
"""

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GENERATOR_VERSION = "1.80.0"  # of grpcio-tools; writes gencode for grpcio >= 1.80.0 and protobuf >= 6.31.1
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"pscore/wire/v1": "proto/sparseps/v1", "psservice/state/v1": "proto/sparseps/journal/v1"}
"""Where stubs live, and so how they import one another, and what they are made of."""
GENERATOR_FOLDER = Path(sys.prefix) / f"grpcio-tools-{GENERATOR_VERSION}"
SHOWN_LINES = 20  # of each drifted file's difference


class GeneratorError(Exception):
    """The generator is not there or did not do its work."""


def prepare() -> None:
    """Fetch the pinned generator unless it is there already."""
    if (GENERATOR_FOLDER / "grpc_tools" / "protoc.py").is_file():
        return
    requirement = f"grpcio-tools=={GENERATOR_VERSION}"
    fetched = Path(tempfile.mkdtemp(prefix="grpcio-tools-", dir=GENERATOR_FOLDER.parent))
    try:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        _run(
            [*install, "--no-deps", "--only-binary=:all:", "--target", str(fetched), requirement],
            f"cannot fetch {requirement}",
        )
        try:
            fetched.rename(GENERATOR_FOLDER)  # at once: a second run beside this one never sees half of it
        except OSError:
            if not (GENERATOR_FOLDER / "grpc_tools" / "protoc.py").is_file():
                raise
    finally:
        shutil.rmtree(fetched, ignore_errors=True)


def generate(output: Path) -> None:
    """Write the stubs of every proto file under `output`."""
    prepare()
    beside_python = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    plugins = {name: shutil.which(name, path=beside_python) for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")}
    if None in plugins.values():
        raise GeneratorError("mypy-protobuf is missing: pip install -e '.[dev]' -c constraints.txt")
    for package, source in PACKAGES.items():
        folder = ROOT / source
        paths = sorted(folder.glob("*.proto"))
        has_services = any("\nservice " in path.read_text(encoding="utf-8") for path in paths)
        kinds = ("python", "mypy", "grpc_python", "mypy_grpc") if has_services else ("python", "mypy")
        _run(
            [sys.executable, "-m", "grpc_tools.protoc", f"-I{package}={folder}"]
            + [f"--plugin={name}={path}" for name, path in plugins.items()]
            + [f"--{kind}_out={output}" for kind in kinds]
            + [f"{package}/{path.name}" for path in paths],
            "the generator failed",
            PYTHONPATH=str(GENERATOR_FOLDER),
        )


def drifted(fresh: Path, kept: Path) -> dict[str, list[str]]:
    """Return, for each stub that is missing, left over or different in `kept`, its unified difference."""
    roots = [(root, root / package) for root in (fresh, kept) for package in PACKAGES]
    stubs = [(root, path) for root, folder in roots for path in folder.glob("*_pb2*.py*") if path.is_file()]
    differences = {}
    for label in sorted({path.relative_to(root).as_posix() for root, path in stubs}):
        before, after = (_lines(root / label) for root in (kept, fresh))
        if before != after:
            differences[label] = list(
                difflib.unified_diff(before or [], after or [], f"{label} (kept)", f"{label} (fresh)", lineterm="", n=1)
            )
    return differences


def _lines(path: Path) -> list[str] | None:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else None


def _run(command: list[str], complaint: str, **environment: str) -> None:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise GeneratorError(f"{complaint}:\n{(done.stdout + done.stderr).strip()}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="Regenerate the stubs of proto/, or check them.")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="compare only; exit status 1 names the files that differ")
    only.add_argument("--prepare", action="store_true", help="fetch the generator only")
    options = parser.parse_args(arguments)
    try:
        if options.prepare:
            prepare()
            return 0
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder))
            fresh = Path(folder)
            differences = drifted(fresh, ROOT)
            if options.check:
                for name, lines in differences.items():
                    print(f"drifted: {name}")
                    for line in lines[:SHOWN_LINES]:
                        print(f"  {line[:160]}")
                if differences:
                    print("run: python tools/generate_stubs.py", file=sys.stderr)
                return 1 if differences else 0
            for name in differences:
                source, target = fresh / name, ROOT / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.is_file():
                    shutil.copyfile(source, target)
                else:
                    target.unlink()
                print(f"{'wrote' if source.is_file() else 'removed'} {name}")
            if not differences:
                print(f"{', '.join(PACKAGES)}: in step with proto/")
    except (GeneratorError, OSError) as error:
        print(f"generate_stubs: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

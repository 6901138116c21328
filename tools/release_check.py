"""What a release must be: ``make release-check`` builds it, looks into it, and installs it in bare environments.

The wheel is made of the source distribution, so that what is missing there is missed here. It is installed for every
Python from 3.11 to 3.14 that is found, outside the source tree, with the tested versions of what it needs; there it
trains a small model with a server on loopback. A Python that is missing, or for which pip has no PyTorch without CUDA,
is told of and left out: ``--any-torch`` takes any, ``--python`` names the interpreters.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pscore", "psclient", "psservice")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SECONDS = 1800

TRAINING = """
import torch
import psclient

if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(256, 32)
    y = x @ torch.randn(32, 1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    with psclient.LocalServer() as server:
        optimizer = psclient.DGS(model.parameters(), lr=0.01, budget=0.1, model=model, server=server.server)
        losses = []
        for _ in range(100):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        optimizer.close()
    assert losses[-1] < losses[0] / 2, losses
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps")
"""


class ReleaseError(Exception):
    """The release is not as it must be; the message says in what."""


def main() -> int:
    """Build, look, install and train; return 1 if anything is wrong, or if no Python could be tried."""
    parser = argparse.ArgumentParser(prog="make release-check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="default: dist/")
    parser.add_argument("--contents", action="store_true", help="build and look, and install nothing")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="look into this one, and build nothing")
    parser.add_argument("--python", nargs="+", metavar="PROGRAM", help="default: every Python from 3.11 to 3.14")
    parser.add_argument("--any-torch", action="store_true", help="accept gigabytes of CUDA")
    options = parser.parse_args()
    try:
        wheel = options.wheel or build(options.output)
        problems = list(contents_problems(wheel))
        if problems:
            raise ReleaseError("; ".join(problems))
        print(f"{wheel.name}: typed, licensed, without tests", flush=True)
        if options.contents:
            return 0
        tried = 0
        for python in options.python or pythons():
            why_not = None if options.any_torch else _lacks_torch(python)
            if why_not is None:
                print(f"{python}: {install_and_train(python, wheel)}", flush=True)
                tried += 1
            else:
                print(f"{python}: left out: {why_not}", flush=True)
        if not tried:
            raise ReleaseError("no Python could be tried")
    except ReleaseError as error:
        print(f"release check FAILED: {error}", file=sys.stderr)
        return 1
    return 0


def build(output: Path) -> Path:
    """Write a source distribution, and a wheel made of it, into a folder; return the wheel's path.

    Older ones of this distribution there are removed.
    """
    output.mkdir(parents=True, exist_ok=True)
    for old in (*output.glob("sparseps-*.whl"), *output.glob("sparseps-*.tar.gz")):
        old.unlink()
    backend = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        keep = ("pyproject.toml", "README.md", "LICENSE")
        source.mkdir()
        for name in keep:
            shutil.copy2(ROOT / name, source)
        for name in PACKAGES:
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        _run([sys.executable, "-c", backend, "build_sdist", str(output.resolve())], source)
        (archive,) = output.glob("sparseps-*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(scratch, filter="data")
        unpacked = Path(scratch) / archive.name.removesuffix(".tar.gz")
        _run([sys.executable, "-c", backend, "build_wheel", str(output.resolve())], unpacked)
    (wheel,) = output.glob("sparseps-*.whl")
    return wheel


def contents_problems(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with the files and the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (metadata_name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(opened.read(metadata_name).decode())
    information = metadata_name.removesuffix("/METADATA")
    version = _version()
    if metadata["Version"] != version:
        yield f"it says version {metadata['Version']}, and the sources {version}"
    if metadata["License-Expression"] != "Apache-2.0" or f"{information}/licenses/LICENSE" not in names:
        yield "it has no licence"
    for package in PACKAGES:
        if f"{package}/py.typed" not in names:
            yield f"{package} is not marked as typed"
    tops = {name.split("/")[0] for name in names} - {*PACKAGES, information}
    if tops:
        yield f"it installs {', '.join(sorted(tops))} too"
    if tests := [name for name in names if "/test_" in name or "tests" in name.split("/")]:
        yield f"it has tests: {tests[0]}"
    for package in PACKAGES:
        sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
        if missing := sources - set(names):
            yield f"it lacks {', '.join(sorted(missing)[:3])}"


def pythons() -> Iterator[str]:
    """Yield the interpreters of :data:`PYTHONS` that are installed; say which are not."""
    for version in PYTHONS:
        places = [
            shutil.which(f"python{version}"),
            *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
        ]
        working = next((str(place) for place in places if place and _is_version(str(place), version)), None)
        if working:
            yield working
        else:
            print(f"python{version}: left out: not installed", flush=True)


def install_and_train(python: str, wheel: Path) -> str:
    """Install a wheel with what a server needs into a new environment, and train there; return what it printed.

    Raises:
        ReleaseError: something failed; with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="sparseps-release-") as name:
        folder = Path(name)
        _run([python, "-m", "venv", str(folder / "venv")], folder)
        within = folder / "venv" / "bin"
        constraints = ("-c", str(ROOT / "constraints.txt"))
        _run([str(within / "python"), *_PIP, "install", "--quiet", *constraints, f"{wheel.resolve()}[server]"], folder)
        _run([str(within / "python"), *_PIP, "check"], folder)
        version = _run([str(within / "psservice"), "--version"], folder).split()[-1]
        if version != _version():
            raise ReleaseError(f"psservice --version says {version}")
        (folder / "train.py").write_text(TRAINING, encoding="utf-8")
        said = _run([str(within / "python"), "train.py"], folder).strip().splitlines()[-1]
    return f"psservice {version}; {said}"


_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


def _version() -> str:
    from pscore.version import __version__

    return __version__


def _lacks_torch(python: str) -> str | None:
    """Return why no PyTorch without CUDA can be had for an interpreter; ``None`` if one can."""
    command = [python, *_PIP, "install", "--quiet", "--ignore-installed", "--dry-run", "--no-deps", "--report=-"]
    try:
        found = _run([*command, "-c", str(ROOT / "constraints.txt"), "torch"], ROOT)
    except ReleaseError as error:
        return f"pip finds no PyTorch for it ({str(error).splitlines()[-1]})"
    version = json.loads(found)["install"][0]["metadata"]["version"]
    return None if version.endswith("+cpu") else f"pip finds PyTorch {version}, which is not built for CPUs"


def _is_version(python: str, version: str) -> bool:
    script = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    answer = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=60, env=_environment())
    return answer.stdout.strip() == version


def _run(command: Sequence[str], folder: Path) -> str:
    answer = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=SECONDS
    )  # fmt: skip
    if answer.returncode != 0:
        words = " ".join(command[:6])
        raise ReleaseError(
            f"{words} … ended with status {answer.returncode}:\n{(answer.stdout + answer.stderr)[-3000:]}"
        )
    return answer.stdout


def _environment() -> dict[str, str]:
    """Return the environment without what would let programs find this source tree, or settings of this machine."""
    unwanted = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {n: v for n, v in os.environ.items() if n not in unwanted and not n.startswith(("PSSERVICE_", "PSCLIENT_"))}


if __name__ == "__main__":
    sys.exit(main())

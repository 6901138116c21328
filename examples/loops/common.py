"""What the loops share: options, a checkpoint that is replaced whole, and torchvision beside a CPU build of torch."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where support is
if importlib.util.find_spec("torchvision"):  # imported before a library imports it; see docs/guide/examples.md
    import support.vision  # noqa: F401


def parser(description: str, epochs: int) -> argparse.ArgumentParser:
    """Return a parser of the options that every loop has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = os.environ.get("PSCLIENT_SERVER")
    parser.add_argument("--server", default=server, help="HOST:PORT; default: PSCLIENT_SERVER; none: plain torch")
    parser.add_argument("--epochs", type=int, default=epochs, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the data's order: another one on each worker")
    parser.add_argument("--out", type=Path, default=Path("runs/loops"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser


def save(state: dict[str, Any], path: Path) -> None:
    """Write a state; a process that is killed meanwhile, or a power cut, leaves the earlier file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".new").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".new").replace(path)

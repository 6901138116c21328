"""Text as bytes, in windows: the source of Python's standard library, which is on every machine, or a folder's."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

from .datafiles import MissingDataError

HELD_OUT_EVERY = 10
SUFFIXES = (".txt", ".md", ".py")
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Every window of a text, end to end: the bytes, and the bytes that follow each.

    Args:
        text: (n,) uint8.
        context: bytes of a window.

    Raises:
        MissingDataError: the text has no whole window.
    """

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self._text, self._context = text, context
        if len(self) < 1:
            raise MissingDataError(f"the text has {len(text)} bytes; one window has {context + 1}: give more text")

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._context
        window = self._text[start : start + self._context + 1].long()
        return window[:-1], window[1:]


def read_text(folder: Path | None, most_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a folder's files in the order of their names; every tenth file is held out.

    Args:
        folder: ``None`` is Python's standard library.
        most_bytes: read.

    Returns:
        The text to train on and the text to test with, (n,) uint8.

    Raises:
        MissingDataError: there is no such folder, or it has no text.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise MissingDataError(f"{root} is not a folder; --text takes one with {', '.join(SUFFIXES)} files")
    suffixes = SUFFIXES if folder else (".py",)
    files = sorted(
        path
        for path in root.rglob("*")
        if path.suffix in suffixes and not _LEFT_OUT & {*path.relative_to(root).parts} and path.is_file()
    )
    parts = bytearray(), bytearray()
    for number, path in enumerate(files):
        parts[number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].extend(path.read_bytes())
        if len(parts[0]) + len(parts[1]) >= most_bytes:
            break
    if not parts[0] or not parts[1]:
        raise MissingDataError(
            f"{root} has {len(files)} files ({', '.join(suffixes)}), of which every tenth is to test with; add more"
        )
    return torch.frombuffer(parts[0], dtype=torch.uint8), torch.frombuffer(parts[1], dtype=torch.uint8)

"""The source of Python's standard library, byte by byte, and a small GRU: no run here learns it to the end."""

import functools
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

WINDOW_BYTES = 24
TEST_WINDOWS = 512
_TRAIN_BYTES, _HELD_OUT_BYTES = 2_000_000, 150_000
_EVERY, _TEST, _VALIDATION = (
    10,
    0,
    5,
)  # of ten files, in the order of their names, one to test with and one to choose by


class ByteModel(nn.Module):
    """A byte-level language model: embedding, GRU, output layer; 113,664 parameters."""

    def __init__(self) -> None:
        """Draw the weights from torch's global generator."""
        super().__init__()
        self.embedding = nn.Embedding(256, 48)
        self.recurrent = nn.GRU(48, 128, batch_first=True)
        self.output = nn.Linear(128, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of every next byte."""
        scores: torch.Tensor = self.output(self.recurrent(self.embedding(text))[0])
        return scores


def make_model() -> nn.Module:
    return ByteModel()


def batches(batch_size: int, seed: int, worker: int, workers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random windows of the training text; the seed alone tells workers apart."""
    return random_windows(_text()[0], WINDOW_BYTES, batch_size, seed)


def held_out(validation: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows, evenly spread over the files to test with, or over those to choose settings by."""
    return spread_windows(_text()[2 if validation else 1], WINDOW_BYTES, TEST_WINDOWS)


def random_windows(
    text: torch.Tensor, length: int, batch_size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of windows of a text, and the bytes that follow each of theirs."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield _windows(text, torch.randint(len(text) - length, (batch_size,), generator=generator), length)


def spread_windows(text: torch.Tensor, length: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows evenly spread over a text, and the bytes that follow each of theirs."""
    return _windows(text, torch.arange(count) * ((len(text) - length) // count), length)


def source() -> str:
    """Say what the data are; other versions of Python have other text, and other losses."""
    texts = _text()
    digest = hashlib.sha256(b"".join(text.numpy().tobytes() for text in texts)).hexdigest()[:12]
    train, test, validation = (len(text) for text in texts)
    return (
        f"Python's standard library: {train} bytes to train on, {validation} of other files to choose settings by, "
        f"{test} of yet others to test with; SHA-256 {digest}…"
    )


@functools.cache
def _text() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [b"", b"", b""]
    for number, path in enumerate(files):
        parts[{_TEST: 1, _VALIDATION: 2}.get(number % _EVERY, 0)] += path.read_bytes()
    train, test, validation = parts
    return _tensor(train[:_TRAIN_BYTES]), _tensor(test[:_HELD_OUT_BYTES]), _tensor(validation[:_HELD_OUT_BYTES])


def _tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]

"""Byte-level transformers: a small one on the source of Python's standard library, a large one on 51 MB of English."""

import functools
import hashlib
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.campaign import fetch, language

WINDOW_BYTES = 64
_BLOCK_BYTES = 1 << 16
_EVERY, _TEST, _VALIDATION = 50, 0, 25  # of fifty blocks one to test with and one to choose settings by
_TEST_WINDOWS = 1024


class Transformer(nn.Module):
    """Embedding, layers with their norms first, output layer; positions are learnt."""

    def __init__(self, width: int, layers: int, heads: int, longest: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(longest, width)
        layer = functools.partial(nn.TransformerEncoderLayer, width, heads, 4 * width, dropout=0.0)
        self.layers = nn.ModuleList(layer(activation="gelu", batch_first=True, norm_first=True) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 256)
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of every next byte."""
        length = text.shape[1]
        hidden = self.embedding(text) + self.positions.weight[:length]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        scores: torch.Tensor = self.output(self.norm(hidden))
        return scores


def make_model() -> nn.Module:
    """Return a transformer of 3.3 million parameters."""
    return Transformer(256, 4, 8, WINDOW_BYTES)


def make_tiny() -> nn.Module:
    """Return one of 198,000 parameters."""
    return Transformer(80, 2, 4, language.WINDOW_BYTES)


def batches(batch_size: int, seed: int, worker: int, workers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random windows of the training text; the seed alone tells workers apart."""
    return language.random_windows(_text()[0], WINDOW_BYTES, batch_size, seed)


def held_out(validation: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows, evenly spread over the blocks to test with, or over those to choose settings by."""
    return language.spread_windows(_text()[2 if validation else 1], WINDOW_BYTES, _TEST_WINDOWS)


def source() -> str:
    """Say what the text is."""
    train, test, validation = _text()
    digest = hashlib.sha256(test.numpy().tobytes()).hexdigest()[:12]
    return (
        f"English: {len(train)} bytes to train on, {len(validation)} to choose settings by, {len(test)} to test with; "
        f"SHA-256 of the last {digest}…"
    )


def is_here() -> bool:
    return fetch.is_here("text.pt")


@functools.cache
def _text() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    whole = fetch.text()
    blocks = whole[: len(whole) // _BLOCK_BYTES * _BLOCK_BYTES].view(-1, _BLOCK_BYTES)
    number = torch.arange(len(blocks)) % _EVERY
    test, validation = number == _TEST, number == _VALIDATION
    return blocks[~(test | validation)].flatten(), blocks[test].flatten(), blocks[validation].flatten()

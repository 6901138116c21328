"""The publisher's baseline: a mapped file of the words of the version that was published last.

The file is as long as the model. Beside it, ``NAME.json`` says which version of which run it is, and its digest; both
are written once a version is published. A file whose digest is another is not believed.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import mkstemp
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.errors import ConfigurationError
from psclient.publisher.source import Octets
from pscore.model.digest import ModelDigest
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.dense import cut

Words = NDArray[Any]

_BLOCK = 1 << 20  # words that are read at a time


class Held(NamedTuple):
    """The version of a baseline: the run, and generation and version of each shard."""

    run_id: str
    shards: tuple[tuple[int, int], ...]


class Baseline:
    """The words of one version of a feed, in a file.

    The file is locked: another publisher would change words that this one compares with.

    Args:
        path: of the file; empty for one that is gone with this object.

    Attributes:
        held: which version the words are; ``None`` if that is not known.
    """

    def __init__(self, path: str | Path) -> None:
        self.held: Held | None = None
        self._is_kept = bool(str(path))
        try:
            if self._is_kept:
                self._path = Path(path)
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            else:
                self._descriptor, name = mkstemp(prefix="psclient-", suffix=".baseline")
                self._path = Path(name)
                os.unlink(name)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise ConfigurationError(
                f"another publisher has the baseline {path}: end it, or name another file"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"cannot keep a baseline at {path}: {error}; name another file") from error
        self._octets: Octets = np.empty(0, np.uint8)
        self._layout: ModelLayout | None = None
        self._digest: ModelDigest | None = None

    @property
    def layout(self) -> ModelLayout:
        """Of the feed; known behind :meth:`open`, or :meth:`fill`."""
        assert self._layout is not None
        return self._layout

    @property
    def words(self) -> Words:
        """The words, mapped from the file: unsigned, ``[n]``."""
        return self._octets.view(f"u{self.layout.word_bytes}")

    def append(self, octets: Octets) -> None:
        """Add a tensor's bytes behind those that were added before, from :meth:`begin` on."""
        view, position = octets.data, 0
        while position < view.nbytes:
            position += os.write(self._descriptor, view[position:])

    def begin(self) -> None:
        """Forget the words, to add others."""
        self._forget()
        self._octets = np.empty(0, np.uint8)  # unmapped first
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)

    def reserve(self, layout: ModelLayout) -> None:
        """Make room for words that are written in any order, into :attr:`words`, until :meth:`fill`."""
        self.begin()
        os.posix_fallocate(self._descriptor, 0, layout.size * layout.word_bytes)
        self._map(layout)

    def fill(self, layout: ModelLayout) -> None:
        """Say of which layout the words are that were added."""
        self._map(layout)
        self._digest = self._computed()

    def open(self, layout: ModelLayout) -> bool:
        """Take over the words of an earlier publisher; False if they are of another layout, damaged or unknown."""
        try:
            plain = json.loads(self._about.read_text(encoding="utf-8"))
            held = Held(str(plain["run_id"]), tuple((int(each[0], 16), int(each[1])) for each in plain["shards"]))
            is_same = plain["fingerprint"] == layout.fingerprint.hex()
            is_whole = os.fstat(self._descriptor).st_size == layout.size * layout.word_bytes
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return False
        if not (self._is_kept and is_same and is_whole):
            return False
        self._map(layout)
        digest = self._computed()
        if digest.value.hex() != plain.get("digest"):
            return False
        self._digest, self.held = digest, held
        return True

    def _map(self, layout: ModelLayout) -> None:
        self._layout = layout
        nbytes = layout.size * layout.word_bytes
        self._octets = np.memmap(f"/dev/fd/{self._descriptor}", np.uint8, "r+", 0, (nbytes,))

    def _computed(self) -> ModelDigest:
        digest = ModelDigest(self.layout)
        for part in self._parts(Span(0, self.layout.size)):
            digest.add(part)
        return digest

    def change(self, changes: Iterable[SparseSlice]) -> None:
        """Put words in the place of others; the version must be named anew by :meth:`hold`."""
        assert self._digest is not None
        self._forget()
        for change in changes:
            start, words = change.span.start, self.words
            where = slice(start, change.span.end) if change.offsets is None else change.offsets.numpy() + start
            before = torch.from_numpy(words[where].copy()).view(self.layout.value_dtype)
            self._digest.remove(SparseSlice(change.span, change.offsets, before))
            self._digest.add(change)
            words[where] = change.values.numpy().view(words.dtype)

    def hold(self, held: Held) -> None:
        """Note which version the words are now."""
        self.held = held
        if self._is_kept:
            assert self._digest is not None
            about = {
                "run_id": held.run_id,
                "shards": [[f"{generation:x}", version] for generation, version in held.shards],
                "fingerprint": self.layout.fingerprint.hex(),
                "digest": self._digest.value.hex(),
            }
            temporary = self._about.with_name(f".{self._about.name}.{secrets.token_hex(3)}")
            temporary.write_text(json.dumps(about), encoding="utf-8")
            os.replace(temporary, self._about)

    def _forget(self) -> None:
        self.held = None
        if self._is_kept:
            self._about.unlink(missing_ok=True)

    @property
    def _about(self) -> Path:
        return self._path.with_name(f"{self._path.name}.json")

    # What a run uploads

    def read(self, span: Span) -> Iterator[SparseSlice]:
        """Yield the words of a span, piece by piece."""
        return self._parts(span)

    def _parts(self, span: Span) -> Iterator[SparseSlice]:
        words, dtype = self.words, self.layout.value_dtype
        for part in cut(span, _BLOCK):
            yield SparseSlice(part, None, torch.from_numpy(words[part.start : part.end].copy()).view(dtype))

    def digest(self) -> bytes:
        """Return 32 bytes that are equal if the words are, and else all but surely not."""
        assert self._digest is not None
        return self._digest.value * 2

    def not_finite(self) -> None:
        """Words are bits: none is refused."""

    def close(self) -> None:
        """Close the file, which stays if it has a name."""
        self._octets = np.empty(0, np.uint8)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

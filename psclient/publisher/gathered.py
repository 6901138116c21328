"""A model of which each rank has blocks: every rank compares its own, and the first one publishes the changes.

What differs, a share of the model, goes to the first rank over the ranks' own network; all of it goes there once. So
the feed's line, which is slower, has one publisher that pushes one stream, and the ranks need no agreement of their
own: a version is published if the first rank has published it.
"""

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from psclient.errors import ConfigurationError, RankLostError, SparsepsError
from psclient.model.blocks import Block, Places, block_of, describe_blocks, owners_of, read_blocks
from psclient.publisher.baseline import Baseline, Held, Words
from psclient.publisher.published import Published
from psclient.publisher.source import Source, layout_of, named, octets_of
from psclient.publisher.words import WordSource, changed, differing, joined, other_model
from psclient.ranks import Messages, RemoteError
from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.dense import cut

_TIMEOUT_SECONDS = 1800.0  # in which every rank must come to a publication: torch's own limit for gloo
_AWAKE_SECONDS = 60.0  # after which the first rank tells the others that it still publishes
_BLOCK = 1 << 20  # words of a segment


class _Owned(NamedTuple):
    """A block that a rank sends: its elements, and where its tensor begins in the layout, in words."""

    block: Block
    tensor: torch.Tensor
    start: int


class Part:
    """The blocks of one rank, and their words in the version that was published last.

    Args:
        path: of the file for these words; empty for one that is gone with this object.
    """

    def __init__(self, path: str) -> None:
        self._baseline = Baseline(path)
        self._blocks: list[tuple[Block, torch.Tensor]] = []
        self._owned: list[_Owned] = []
        self._layout: ModelLayout | None = None
        self._changes: list[SparseSlice] | None = None  # of the publication that is under way; all, if None

    @property
    def held(self) -> Held | None:
        """Which version the words are of; ``None`` if that is not known."""
        return self._baseline.held if self._layout is not None else None

    def take(self, source: Source) -> bytes:
        """Take this rank's blocks of a source, and describe them; raises :class:`ConfigurationError`."""
        if isinstance(source, Iterator):
            raise ConfigurationError("ranks publish a module, a mapping or a list of tensors: an iterator is read once")
        self._blocks = [block_of(name, tensor) for name, tensor in named(source, DTensor)]
        starts = {each.block: each.start for each in self._owned}
        self._owned = [_Owned(*each, starts[each[0]]) for each in self._blocks if each[0] in starts]
        return describe_blocks([block for block, _ in self._blocks])

    def own(self, starts: list[int], word_bytes: int) -> None:
        """Take over the blocks that this rank sends: where the tensor of each begins, −1 if another rank sends it."""
        self._owned = [
            _Owned(block, tensor, start)
            for (block, tensor), start in zip(self._blocks, starts, strict=True)
            if start >= 0
        ]
        specs = tuple(TensorSpec(each.block.spec.name, each.block.shape, each.tensor.dtype) for each in self._owned)
        layout = ModelLayout(specs, word_bytes=word_bytes) if specs else None
        if layout != self._layout:
            self._layout = layout
            self._baseline.held = None
            if layout is not None:
                self._baseline.open(layout)

    def all(self) -> Iterator[Words]:
        """Yield the words of each block that this rank sends, and keep them."""
        self._changes = None
        if self._layout is None:
            return
        self._baseline.begin()
        for each in self._owned:
            octets = octets_of(each.tensor)
            self._baseline.append(octets)
            yield octets.view(f"u{self._layout.word_bytes}")
        self._baseline.fill(self._layout)

    def changes(self) -> tuple[list[int], Places, Words]:
        """Return how many words of each block have changed, where in the layout they lie, and the words."""
        self._changes, counts = [], []
        places, words = [np.empty(0, np.int64)], list[Words]()
        for number, each in enumerate(self._owned):
            assert self._layout is not None
            start = self._layout.offsets[number]
            mine = octets_of(each.tensor).view(self._baseline.words.dtype)
            found = list(changed(mine, self._baseline, start))
            self._changes += found
            counts.append(sum(part.entries for part in found))
            per_element = each.tensor.element_size() // self._layout.word_bytes
            for part in found:
                assert part.offsets is not None
                inside = part.offsets.numpy() + (part.span.start - start)
                places.append(each.start + each.block.offsets(inside, per_element))
                words.append(part.values.numpy().view(mine.dtype))
        return counts, np.concatenate(places), np.concatenate(words) if words else np.empty(0, np.uint8)

    def end(self, held: Held | None) -> None:
        """Note that a version is published; ``None``: it is not, or not for certain."""
        if held is None or self._layout is None:
            return
        if self._changes is not None:
            self._baseline.change(self._changes)
        self._changes = []
        self._baseline.hold(held)

    def close(self) -> None:
        """Close the file, which stays if it has a name."""
        self._baseline.close()


class _Remote:
    """The first rank's view of another one, or of itself."""

    def __init__(self) -> None:
        self.description = ""  # its hash
        self.blocks: list[Block] = []
        self.held: Held | None = None
        self.owned: list[tuple[Block, int]] = []  # and the tensor's position in the layout


class Gathered:
    """The ranks of a group that publish together: made, and called, on all of them in the same order.

    Args:
        group: of the ranks; the first one speaks to the server.
        baseline: path of the file of the first rank's publisher; beside it each rank has one for its own blocks.
    """

    def __init__(self, group: dist.ProcessGroup, baseline: str | Path) -> None:
        self._messages = Messages(group, _TIMEOUT_SECONDS)
        path = str(baseline)
        self._part = Part(path and f"{path}.rank{self._messages.rank}")
        self._others = [_Remote() for _ in range(self._messages.size)]
        self._layout: ModelLayout | None = None
        self._telling = threading.Lock()

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks to the server."""
        return self._messages.rank == 0

    def publish(
        self, source: Source, publish: Callable[[WordSource], Published], held: Callable[[], Held | None]
    ) -> Published:
        """Publish the source's blocks with those of the other ranks.

        On the first rank ``publish`` does it, and ``held`` tells which version the first rank's baseline then has.
        """
        try:
            if not self.is_first:
                return self._serve(source)
            with self._awake():
                return self._lead(source, publish, held)
        except SparsepsError:
            raise
        except BaseException:
            self.close()  # this rank may have stopped in the middle of what it sends or receives
            raise

    def close(self) -> None:
        """End the connections, so that no rank waits for this one."""
        self._messages.close()
        self._part.close()

    # On the first rank

    def _lead(
        self, source: Source, publish: Callable[[WordSource], Published], held: Callable[[], Held | None]
    ) -> Published:
        try:
            self._meet(source)
            published = publish(self)
        except SparsepsError as error:
            self._tell_end({"error": vars(RemoteError.of(error))})
            raise
        now = held()
        self._tell_end({"published": published, "held": _plain(now)})
        self._part.end(now)
        return published

    def _tell_end(self, how: dict[str, Any]) -> None:
        for rank in range(1, self._messages.size):
            with suppress(RankLostError):  # the next call says so
                self._tell(rank, {"do": "end", "published": None, "held": None, "error": None} | how)

    def _meet(self, source: Source) -> None:
        """Learn the blocks of every rank, and which rank sends which; raises a rank's :class:`ConfigurationError`."""
        faults: list[SparsepsError] = []
        descriptions = [b""]
        try:
            descriptions = [self._part.take(source)]
        except SparsepsError as error:
            faults.append(error)
        hashes = [_hash(descriptions[0])]
        self._others[0].held = self._part.held
        for rank in range(1, self._messages.size):
            status = json.loads(self._messages.receive(rank).tobytes())
            if status["fault"] is not None:
                faults.append(RemoteError(**status["fault"]).rebuild(RankLostError))
            hashes.append(status["description"])
            self._others[rank].held = _held_of(status["held"])
        if faults:
            raise faults[0]
        if hashes == [each.description for each in self._others]:
            return
        for rank in range(1, self._messages.size):
            self._tell(rank, {"do": "describe"})
            descriptions.append(self._messages.receive(rank).tobytes())
        for other, told, found in zip(self._others, descriptions, hashes, strict=True):
            other.blocks, other.description = read_blocks(told), found
        self._agree()
        self._others[0].held = self._part.held
        for rank in range(1, self._messages.size):
            self._others[rank].held = _held_of(json.loads(self._messages.receive(rank).tobytes()))

    def _agree(self) -> None:
        """Lay the tensors of all ranks out, and say which rank sends which blocks."""
        specs, spoken_for = owners_of([other.blocks for other in self._others])
        self._layout = layout = layout_of(specs)
        positions = {spec.name: position for position, spec in enumerate(specs)}
        for rank, (other, is_mine) in enumerate(zip(self._others, spoken_for, strict=True)):
            pairs = [(block, positions[block.spec.name]) for block in other.blocks]
            other.owned = [pair for pair, mine in zip(pairs, is_mine, strict=True) if mine]
            starts = [
                layout.offsets[position] if mine else -1 for (_, position), mine in zip(pairs, is_mine, strict=True)
            ]
            if rank:
                self._tell(rank, {"do": "own", "word_bytes": layout.word_bytes}, np.array(starts, np.int64))
            else:
                self._part.own(starts, layout.word_bytes)

    @property
    def layout(self) -> ModelLayout | None:
        """See :class:`WordSource`."""
        return self._layout

    def fill(self, baseline: Baseline) -> None:
        """See :class:`WordSource`."""
        assert self._layout is not None
        baseline.reserve(self._layout)
        for rank in range(self._messages.size):
            for (block, position), words in zip(self._others[rank].owned, self._all(rank, baseline), strict=True):
                block.write(self._whole(baseline, position), words, self._words_of(block))
        baseline.fill(self._layout)

    def differences(self, baseline: Baseline) -> Iterator[SparseSlice]:
        """See :class:`WordSource`."""
        layout = self._layout
        assert layout is not None
        for spec, held in zip(layout.parameters, baseline.layout.parameters, strict=False):
            if spec != held:
                raise other_model(spec, held)
        if layout != baseline.layout:
            raise ConfigurationError("the ranks have more tensors than the feed, or fewer; start another feed for them")
        found: dict[int, list[tuple[Places, Words]]] = defaultdict(list)
        for rank, other in enumerate(self._others):
            if other.held is not None and other.held == baseline.held:
                counts, places, words = self._changes(rank, baseline)
                ends = np.cumsum(counts)
                for (_, position), start, end in zip(other.owned, ends - counts, ends, strict=True):
                    if start < end:
                        found[position].append((places[start:end], words[start:end]))
                continue
            for (block, position), words in zip(other.owned, self._all(rank, baseline), strict=True):
                per_element = self._words_of(block)
                places = differing(words, block.of(self._whole(baseline, position), per_element))
                if places.size:
                    whole = layout.offsets[position] + block.offsets(places, per_element)
                    found[position].append((whole, words[places]))
        yield from joined(each for position in sorted(found) for each in self._segments(position, found.pop(position)))

    def _segments(self, position: int, parts: list[tuple[Places, Words]]) -> Iterator[SparseSlice]:
        """Merge the words of one tensor that ranks have sent."""
        layout = self._layout
        assert layout is not None
        places = np.concatenate([each for each, _ in parts])
        words = np.concatenate([each for _, each in parts])
        if len(parts) > 1 and bool((np.diff(places) < 0).any()):
            order = np.argsort(places, kind="stable")
            places, words = places[order], words[order]
        span = Span(layout.offsets[position], layout.offsets[position + 1])
        values = torch.from_numpy(words).view(layout.value_dtype)
        whole = SparseSlice(span, torch.from_numpy(places - span.start), values)
        for part in cut(span, _BLOCK):
            if (segment := whole.clip(part)) is not None:
                yield segment

    def _whole(self, baseline: Baseline, position: int) -> Words:
        offsets = baseline.layout.offsets
        return baseline.words[offsets[position] : offsets[position + 1]]

    def _words_of(self, block: Block) -> int:
        assert self._layout is not None
        return block.spec.dtype.itemsize // self._layout.word_bytes

    def _all(self, rank: int, baseline: Baseline) -> Iterator[Words]:
        """Yield the words of each block that a rank sends."""
        if not rank:
            yield from self._part.all()
            return
        self._tell(rank, {"do": "all"})
        for _ in self._others[rank].owned:
            yield self._messages.receive(rank).view(baseline.words.dtype)

    def _changes(self, rank: int, baseline: Baseline) -> tuple[NDArray[np.int64], Places, Words]:
        """Return how many words of each of a rank's blocks have changed, where, and the words."""
        if not rank:
            counts, places, words = self._part.changes()
            return np.array(counts, np.int64), places, words.view(baseline.words.dtype)
        self._tell(rank, {"do": "changes"})
        found = [self._messages.receive(rank) for _ in range(3)]
        return found[0].view(np.int64), found[1].view(np.int64), found[2].view(baseline.words.dtype)

    def _tell(self, rank: int, command: dict[str, Any], beside: NDArray[Any] | None = None) -> None:
        with self._telling:
            self._messages.send(rank, json.dumps(command).encode())
            if beside is not None:
                self._messages.send(rank, beside)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Tell the others from time to time that this rank still publishes."""
        ended = threading.Event()

        def tell() -> None:
            with suppress(RankLostError):
                while not ended.wait(_AWAKE_SECONDS):
                    for rank in range(1, self._messages.size):
                        self._tell(rank, {"do": "wait"})

        thread = threading.Thread(target=tell, name="psclient-awake", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    # On the other ranks

    def _serve(self, source: Source) -> Published:
        """Answer the first rank's commands, until it tells how the publication has ended."""
        part, messages, fault, description = self._part, self._messages, None, b""
        try:
            description = part.take(source)
        except SparsepsError as error:
            fault = error
        status = {
            "fault": fault and vars(RemoteError.of(fault)),
            "description": _hash(description),
            "held": _plain(part.held),
        }
        messages.send(0, json.dumps(status).encode())
        while True:
            command = json.loads(messages.receive(0).tobytes())
            match command["do"]:
                case "describe":
                    messages.send(0, description)
                case "own":
                    part.own(messages.receive(0).view(np.int64).tolist(), command["word_bytes"])
                    messages.send(0, json.dumps(_plain(part.held)).encode())
                case "all":
                    for words in part.all():
                        messages.send(0, words)
                case "changes":
                    counts, places, words = part.changes()
                    for each in (np.array(counts, np.int64), places, words):
                        messages.send(0, each)
                case "end":
                    part.end(_held_of(command["held"]))
                    if fault is not None:
                        raise fault
                    if command["error"] is not None:
                        raise RemoteError(**command["error"]).rebuild(RankLostError)
                    return Published(*command["published"])


def _hash(description: bytes) -> str:
    return hashlib.sha256(description).hexdigest()


def _plain(held: Held | None) -> list[Any] | None:
    return None if held is None else [held.run_id, held.shards]


def _held_of(plain: list[Any] | None) -> Held | None:
    return None if plain is None else Held(plain[0], tuple((each[0], each[1]) for each in plain[1]))

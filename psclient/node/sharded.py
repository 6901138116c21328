"""The ranks of a worker that has a model in parts: the leader's engine asks, and every rank does it on its own blocks.

The leader broadcasts a command, does its own share, and then receives what the others have found. They serve until the
leader says that the call is over. So the engine on the leader has a whole model at hand, of which only what is on its
way is in the leader's memory: selected entries, or some megabytes of values.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from psclient.compress.gradients import Gradients
from psclient.compress.groups import ParamGroups
from psclient.compress.host_table import Choice
from psclient.compress.method import Method, State
from psclient.compress.residuals import RESIDUAL_TYPES
from psclient.errors import ConfigurationError, SparsepsError
from psclient.model.blocks import Block, block_of, copies_of, describe_blocks, owners_of, read_blocks
from psclient.model.module import TrainedModel
from psclient.model.part import fill, range_of
from psclient.model.requirements import is_dtensor
from psclient.node.comm import NodeComm
from psclient.node.rank import Rank, Selected, joined_offsets, octets_in
from psclient.node.sharded_selection import ShardedSelection
from psclient.node.sharded_values import ShardedValues
from psclient.ranks import RemoteError
from pscore.model.layout import Span, digest_of
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SELECTORS
from pscore.wire.dense import cut

Found = TypeVar("Found")

_SAME_NORM = 0.01  # relative; equal gradients of GPUs may differ in rounding
_NO_NORM = 1e-4  # of the largest norm: what is smaller may be rounding alone
_PIECE = 4 << 20  # elements of a tensor, or entries, that travel at a time


def digest_of_all(tensor: torch.Tensor, comm: NodeComm) -> bytes:
    """Return the SHA-256 of all of a tensor's values on every rank; all call this, in the same order."""
    if not is_dtensor(tensor):
        return digest_of(tensor)
    block, _ = block_of("a frozen parameter", tensor)
    pieces = list(cut(Span(0, block.spec.numel), max(1, _PIECE // block.spec.dtype.itemsize)))
    if not comm.is_leader:
        comm.send(0, describe_blocks([block]))
        if comm.receive(0)[0]:
            for piece in pieces:
                if len(mine := range_of(block, 0, piece)):
                    comm.send(0, octets_in(tensor, mine).numpy())
        return comm.broadcast_bytes()
    blocks = [block] + [read_blocks(comm.receive(rank).tobytes())[0] for rank in range(1, comm.size)]
    _, speaks = owners_of([[each] for each in blocks])
    for rank in range(1, comm.size):
        comm.send(rank, bytes(speaks[rank]))
    digest = hashlib.sha256()
    for piece in pieces:
        octets = torch.empty((piece.length, block.spec.dtype.itemsize), dtype=torch.uint8, device="cpu")
        for rank, (each, [is_mine]) in enumerate(zip(blocks, speaks, strict=True)):
            mine = range_of(each, 0, piece)
            if is_mine and len(mine):
                found = octets_in(tensor, mine) if not rank else torch.from_numpy(comm.receive(rank))
                fill(octets, found.view(len(mine), -1), each, mine, piece.start)
        digest.update(octets.numpy().data)
    return comm.broadcast_bytes(digest.digest())


class Sharded:
    """The ranks together: on the leader the home of its engine; on the others it serves the leader's commands.

    Args:
        rank: this one's blocks.
        states: returns the states of this rank's optimizer, by parameter.

    Attributes:
        model: the whole one.
        method: of the optimizer.
        in_call: whether the other ranks serve; else commands are for the leader's own blocks alone, as when it ends.
        loaded: of each rank the position of a parameter that its script has written to; −1 for none.
        drifted: the same of parameters that were written to without a trace.
    """

    def __init__(
        self,
        comm: NodeComm,
        model: TrainedModel,
        rank: Rank,
        method: Method,
        states: Callable[[], MutableMapping[torch.Tensor, State]],
    ) -> None:
        self.model, self.method, self.in_call = model, method, False
        self.loaded: list[int] = []
        self.drifted: list[int] = []
        self._comm, self._rank, self._states = comm, rank, states
        self._blocks: list[list[Block]] = []  # of each rank, by position; known on the leader
        self._speaks: list[list[bool]] = []
        self._copies: list[tuple[int, list[int]]] = []  # a position, and the ranks that have the same block of it
        self._has_compared = False

    # On the leader: what its engine asks

    def gradients(self, groups: ParamGroups, positions: range) -> dict[int, torch.Tensor]:
        """See :class:`~psclient.engine.home.Ranks`: the leader's blocks, by which a step knows that they are new."""
        return self._rank.part.gradients(n for n in groups.trained(self.model.parameters) if n in positions)

    def home(
        self,
        method: Method,
        model: TrainedModel,
        states: MutableMapping[torch.Tensor, State],
        groups: ParamGroups,
        choice: Choice,
    ) -> "Sharded":
        """Meet the other ranks, and return this."""
        part = self._rank.part
        descriptions = self.ask("describe", lambda: list(part.blocks), lambda rank, _: self._described(rank))
        _, speaks = owners_of(descriptions)
        self._blocks, self._speaks = descriptions, speaks
        name = next(name for name, function in SELECTORS.items() if function is choice.selector)
        # A block is small if its tensor is, which as many ranks have a block of.
        pieces = max(sum(column) for column in zip(*speaks, strict=True))
        below = -(-choice.dense_below // pieces)
        kept_in = next(name for name, dtype in RESIDUAL_TYPES.items() if dtype == choice.kept_in)
        self.tell("prepare", speaks=speaks, selector=name, dense_below=below, kept_in=kept_in)
        self._copies = copies_of(descriptions)
        self._rank.speaks = speaks[0]
        self._rank.prepare(method, states, name, below, kept_in)
        self.replica = ShardedValues(self, model.layout)
        self.selector = ShardedSelection(self, groups, self._rank.selector.memories)
        return self

    def room(self, _: Span) -> torch.Tensor | None:
        """See :class:`~psclient.engine.home.Home`: there is none, and a reply of everything is spilled."""
        return None

    def spill(self, segments: Sequence[SparseSlice]) -> None:
        """Write the beginning of a reply of everything, which the leader then need not hold."""
        self.replica.write(segments)

    def _described(self, rank: int) -> list[Block]:
        return read_blocks(self._comm.receive(rank).tobytes())

    def finite(self, found: Mapping[int, torch.Tensor], *, waits: bool) -> Gradients:
        """See :class:`~psclient.engine.home.Home`; the ranks keep the gradients, and the leader returns its own.

        Raises:
            ConfigurationError: a rank has no gradient at all, and another one has; or ranks that have the same block
                have different gradients of it, which is looked for in the first step.
        """
        copied = [] if self._has_compared else sorted({position for position, _ in self._copies})
        told = self.ask("gather", lambda: self._rank.gather(copied), lambda _, each: each, copied=copied)
        self._check_together(told)
        self._has_compared = True
        return Gradients(found)

    def _check_together(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Raise :class:`ConfigurationError` unless what :meth:`Rank.gather` has returned on each rank fits together."""
        lacks = [each["trained"] > 0 and len(each["missing"]) == each["trained"] for each in told]
        has = [len(each["missing"]) < each["trained"] for each in told]
        if any(lacks) and any(has):
            raise ConfigurationError(
                f"rank {lacks.index(True)} of the group has no gradient at all in this step, and rank "
                f"{has.index(True)} has: every rank has to call backward() on a batch before step(), on the model "
                "whose parameters the optimizer has"
            )
        missing, norms = [set(each["missing"]) for each in told], [dict(each["norms"]) for each in told]
        floor = _NO_NORM * max((norm for each in norms for norm in each.values()), default=0.0)
        for position, ranks in self._copies:
            name = self.model.layout.parameters[position].name
            same = f"have the same values of {name!r}, and their gradients have to be equal"
            mend = "average them over these ranks before step(), as FSDP does over its mesh"
            first, *others = ranks
            for other in others:
                if position in missing[first] and position not in missing[other]:
                    raise ConfigurationError(
                        f"ranks {first} and {other} {same}, but rank {first}, whose counts, has none: {mend}"
                    )
                one, two = (norms[rank].get(position) for rank in (first, other))
                if one is None or two is None:
                    continue
                if abs(one - two) > max(_SAME_NORM * max(one, two), floor):
                    raise ConfigurationError(
                        f"ranks {first} and {other} {same}, but the norms are {one:.4g} and {two:.4g}: {mend}; a model "
                        "that several rows of ranks have is one worker for each row, with a group of its own"
                    )

    def with_norms_of(self, gradients: Gradients) -> Sequence[torch.Tensor]:
        """See :class:`~psclient.engine.home.Home`: the norm of each block, as a tensor of one element."""
        found = self.ask(
            "norms", self._rank.norms, lambda _, told: torch.tensor(told, dtype=torch.float32, device="cpu")
        )
        return list(torch.cat(found).view(-1, 1))

    def check_frozen(self) -> None:
        """See :class:`~psclient.engine.home.Home`."""
        found = self.ask("frozen writes", self.model.written_frozen, lambda _, told: told)
        self.model.check_frozen(sorted({number for each in found for number in each}), self._digest_again)

    def _digest_again(self, tensor: torch.Tensor) -> bytes:
        number = next(number for number, each in enumerate(self.model.frozen) if each is tensor)
        self.tell("frozen", number=number)
        return digest_of_all(tensor, self._comm)

    # Commands

    def tell(self, do: str, *tensors: torch.Tensor, **command: Any) -> None:
        """Give the other ranks a command, with tensors of theirs on the host behind it."""
        if self.in_call:
            self._comm.broadcast_bytes(json.dumps({"do": do, **command}).encode())
            self._comm.broadcast_tensors_of(tensors)

    def attempt(
        self, do: str, mine: Callable[[], Found], received: Callable[[int, Any], Found], **command: Any
    ) -> tuple[list[tuple[int, Found]], list[SparsepsError]]:
        """Give a command, and return each rank's number and result, and the errors of the others.

        ``received`` gets a rank, and its answer.
        """
        self.tell(do, **command)
        found: list[tuple[int, Found]] = []
        faults: list[SparsepsError] = []
        try:
            found.append((0, mine()))
        except SparsepsError as error:
            faults.append(error)
        except BaseException:
            self._comm.close()
            raise
        for rank in range(1, self._comm.size if self.in_call else 1):
            told = json.loads(self._comm.receive(rank).tobytes())
            if told["fault"] is not None:
                faults.append(RemoteError(**told["fault"]).rebuild())
            else:
                found.append((rank, received(rank, told["found"])))
        return found, faults

    def ask(
        self, do: str, mine: Callable[[], Found], received: Callable[[int, Any], Found], **command: Any
    ) -> list[Found]:
        """Give a command, and return each rank's result; raises the first rank's error once all are through."""
        found, faults = self.attempt(do, mine, received, **command)
        if faults:
            raise faults[0]
        return [each for _, each in found]

    def end(self) -> None:
        """Tell the other ranks that the call is over."""
        self.tell("end")
        self.in_call = False

    # What is selected

    def select(
        self, do: str, group: range, values: Sequence[Mapping[str, float]], mine: Callable[[], Selected], **command: Any
    ) -> tuple[list[SparseSlice], list[Selected], list[SparsepsError]]:
        """Have all ranks select; return the entries in the whole layout, each rank's selection, and errors."""
        found, faults = self.attempt(
            do, mine, self._receive_selected, group=[group.start, group.stop], values=values, **command
        )
        return self._combined(found), [each for _, each in found], faults

    def _receive_selected(self, rank: int, told: Any) -> Selected:
        """Read the selection that :meth:`_send_selected` wrote."""
        offsets = torch.from_numpy(self._comm.receive(rank).view(np.int64))
        values = torch.from_numpy(self._comm.receive(rank).view(np.float32))
        entries, first, first_offset = [], 0, 0
        for position, count, is_sparse in told["rows"]:
            places = offsets[first_offset : first_offset + count] if is_sparse else None
            span = self.model.layout.span(position)
            entries.append((position, SparseSlice(span, places, values[first : first + count])))
            first += count
            first_offset += count if is_sparse else 0
        return Selected(entries, told["wanted"], told["found"])

    def _combined(self, found: Sequence[tuple[int, Selected]]) -> list[SparseSlice]:
        """Join the entries of all ranks, ascending; neighbours of which all is there become one dense run."""
        by_position: dict[int, list[tuple[Block, SparseSlice]]] = defaultdict(list)
        for rank, selected in found:
            for position, entries in selected.entries:
                by_position[position].append((self._blocks[rank][position], entries))
        joined: list[SparseSlice] = []
        run: list[int] = []
        for position in sorted(by_position):
            parts = by_position[position]
            if all(each.offsets is None for _, each in parts) and (
                sum(each.entries for _, each in parts) == self.model.layout.parameters[position].numel
            ):
                if run and run[-1] != position - 1:
                    joined.append(self._dense(run, by_position))
                    run = []
                run.append(position)
            else:
                joined.append(_sparse(parts))
        if run:
            joined.append(self._dense(run, by_position))
        return joined

    def _dense(self, run: Sequence[int], parts: Mapping[int, Sequence[tuple[Block, SparseSlice]]]) -> SparseSlice:
        """Write the blocks of neighbouring parameters into one array."""
        offsets = self.model.layout.offsets
        span = Span(offsets[run[0]], offsets[run[-1] + 1])
        values = np.empty(span.length, np.float32)
        for position in run:
            whole = values[offsets[position] - span.start : offsets[position + 1] - span.start]
            for block, each in parts[position]:
                block.write(whole, each.values.numpy(), 1)
        return SparseSlice(span, None, torch.from_numpy(values))

    def spread(self, do: str, segments: Iterable[SparseSlice], **command: Any) -> Iterator[SparseSlice]:
        """Give all ranks a command with entries, piece by piece; yields the pieces."""
        for segment in segments:
            for piece in _pieces(segment.cpu()):
                form = [piece.span.start, piece.span.end, piece.entries, str(piece.values.dtype).removeprefix("torch.")]
                tensors = [piece.values.contiguous()] if piece.offsets is None else [piece.offsets, piece.values]
                self.tell(do, *(each.contiguous() for each in tensors), form=form, sparse=len(tensors) > 1, **command)
                yield piece

    def _spread(self, command: Mapping[str, Any]) -> SparseSlice:
        """Receive a piece of :meth:`spread`."""
        start, end, entries, dtype = command["form"]
        values = torch.empty(entries, dtype=getattr(torch, dtype), device="cpu")
        offsets = torch.empty(entries, dtype=torch.int64, device="cpu") if command["sparse"] else None
        self._comm.broadcast_tensors_of([values] if offsets is None else [offsets, values])
        return SparseSlice(Span(start, end), offsets, values)

    def read(self, span: Span) -> Iterator[SparseSlice]:
        """Yield the values of a span, a parameter at a time; see :meth:`ShardedValues.read`."""
        layout = self.model.layout
        parts = list(layout.overlapping(span))
        by_rank = [
            [range_of(blocks[n], layout.offsets[n], common) if speaks[n] else range(0) for n, common in parts]
            for blocks, speaks in zip(self._blocks, self._speaks, strict=True)
        ]
        self.tell("read", span=[span.start, span.end])
        found = [self._rank.read(span)]
        for rank in range(1, len(by_rank)):
            count = sum(map(len, by_rank[rank]))
            told = self._comm.receive(rank).view(np.float32) if count else np.empty(0, np.float32)
            found.append(torch.from_numpy(told))
        taken = [0] * len(found)
        for number, (position, common) in enumerate(parts):
            values = torch.empty(common.length, dtype=torch.float32, device="cpu")
            for rank, of_rank in enumerate(by_rank):
                mine = of_rank[number]
                if len(mine):
                    part = found[rank][taken[rank] : taken[rank] + len(mine)]
                    taken[rank] += len(mine)
                    low = common.start - layout.offsets[position]
                    fill(values, part, self._blocks[rank][position], mine, low)
            yield SparseSlice(common, None, values)

    def checksums(self) -> dict[tuple[int, int], int]:
        """Return the checksums of the blocks of :meth:`Replica.digest` that some rank has whole."""
        found = self.ask("checksums", self._rank.checksums, lambda _, told: told)
        return {(position, number): checksum for each in found for position, number, checksum in each}

    def not_finite(self) -> str | None:
        """See :class:`~psclient.engine.home.Values`."""
        found = self.ask("not finite", self._rank.not_finite, lambda _, told: int(told))
        positions = [position for position in found if position >= 0]
        return self.model.layout.parameters[min(positions)].name if positions else None

    def written(self) -> list[int]:
        """See :class:`~psclient.engine.home.Values`."""
        found = self.ask("written", self._rank.values.written, lambda _, told: told)
        return sorted({position for each in found for position in each})

    @property
    def rank(self) -> Rank:
        """This rank's blocks."""
        return self._rank

    # On the other ranks

    @torch.no_grad()
    def serve(self) -> None:
        """Carry out the leader's commands, until it says that the call is over."""
        try:
            while (command := json.loads(self._comm.broadcast_bytes()))["do"] != "end":
                self._do(command)
        except SparsepsError:
            raise
        except BaseException:
            self._comm.close()  # this rank may have stopped in the middle of what it sends or receives
            raise

    def _do(self, command: Mapping[str, Any]) -> None:
        rank = self._rank
        match command["do"]:
            case "describe":
                if self._answer(lambda: True):
                    self._comm.send(0, describe_blocks(rank.part.blocks))
            case "prepare":
                rank.speaks = command["speaks"][self._comm.rank]
                rank.prepare(
                    self.method, self._states(), command["selector"], command["dense_below"], command["kept_in"]
                )
            case "gather":
                self._answer(lambda: rank.gather(command["copied"]))
            case "norms":
                self._answer(lambda: rank.norms().tolist())
            case "compress":
                self._send_selected(
                    lambda: rank.compress(range(*command["group"]), command["values"], command["scale"])
                )
            case "take residuals":
                self._send_selected(lambda: rank.take_residuals(range(*command["group"]), command["values"]))
            case "abandon":
                rank.abandon()
            case "restore":
                rank.restore([self._spread(command)], at_once=command["at_once"])
            case "write":
                rank.write([self._spread(command)], adds=command["adds"])
            case "open fp32":
                rank.open_fp32(Span(*command["span"]))
            case "read":
                values = rank.read(Span(*command["span"]))
                if values.numel():
                    self._comm.send(0, values.numpy())
            case "checksums":
                self._answer(rank.checksums)
            case "not finite":
                self._answer(rank.not_finite)
            case "written":
                self._answer(rank.values.written)
            case "accept":
                rank.values.accept()
            case "sample":
                rank.values.sample()
            case "frozen writes":
                self._answer(self.model.written_frozen)
            case "frozen":
                digest_of_all(self.model.frozen[command["number"]], self._comm)

    def _answer(self, work: Callable[[], Found]) -> Found | None:
        """Send the leader the result of some work, or its error."""
        try:
            found = work()
        except SparsepsError as error:
            self._comm.send(0, json.dumps({"fault": vars(RemoteError.of(error))}).encode())
            return None
        self._comm.send(0, json.dumps({"fault": None, "found": found}).encode())
        return found

    def _send_selected(self, work: Callable[[], Selected]) -> None:
        selected = Selected()

        def described() -> dict[str, Any]:
            nonlocal selected
            selected = work()
            rows = [[position, each.entries, each.offsets is not None] for position, each in selected.entries]
            return {"rows": rows, "wanted": selected.wanted, "found": selected.found}

        if self._answer(described) is not None:
            offsets, values = joined_offsets(selected)
            self._comm.send(0, offsets)
            self._comm.send(0, values.numpy())


def _sparse(parts: Sequence[tuple[Block, SparseSlice]]) -> SparseSlice:
    """Join entries of one parameter that ranks have found in their blocks."""
    span = parts[0][1].span
    offsets = np.concatenate(
        [
            block.offsets(np.arange(each.entries), 1) if each.offsets is None else each.offsets.numpy()
            for block, each in parts
        ]
    )
    values = np.concatenate([each.values.numpy() for _, each in parts])
    if len(parts) > 1 and bool((np.diff(offsets) < 0).any()):
        order = np.argsort(offsets, kind="stable")
        offsets, values = offsets[order], values[order]
    return SparseSlice(span, torch.from_numpy(offsets), torch.from_numpy(values))


def _pieces(segment: SparseSlice) -> Iterator[SparseSlice]:
    """Cut entries into pieces that travel one after another."""
    for first in range(0, segment.entries, _PIECE):
        values = segment.values[first : first + _PIECE]
        if segment.offsets is not None:
            yield SparseSlice(segment.span, segment.offsets[first : first + _PIECE], values)
        else:
            start = segment.span.start + first
            yield SparseSlice(Span(start, start + values.numel()), None, values)

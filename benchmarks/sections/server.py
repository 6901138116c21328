"""Section 2: what a push and a pull cost the server, against a bare ``index_add_`` and a copy of the model."""

from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.harness.section import Plan, Section, Table
from benchmarks.harness.timing import Case, Rounds, Stat, Stopwatch, interleave, ratio
from benchmarks.sections.wire import OTHER_PUSHES
from benchmarks.workload.layouts import noise_push
from benchmarks.workload.shard_server import InProcessShard
from pscore.selection import DEFAULT_DENSE_BELOW
from pscore.wire.v1 import parameter_server_pb2 as pb

KEY, TITLE = "server", "What the server does with a push and a pull"

_COPY, _BARE, _PUSH = "copy of the model", "bare index_add_", "push, everything"
_TOPK_AFTER = 16
_JOURNALS = {"no journal": None, "journal, fsync interval": "interval", "journal, fsync always": "always"}
_NO_JOURNAL = next(iter(_JOURNALS))


def run(plan: Plan) -> Section:
    """Time pushes, then pulls, each beside the two yardsticks."""
    section = Section(KEY, TITLE)
    yardsticks = _Yardsticks(plan)
    pushes = _pushes(plan, yardsticks)
    section.tables.append(_table(f"A push of {plan.density:.0%}, milliseconds", pushes, _PUSH_ROWS))
    section.figures["push"] = _figures(pushes)
    journals = _journals(plan, yardsticks)
    section.tables.append(_journal_table(plan, journals))
    section.figures["journal"] = {
        name: {"seconds": Stat.of(journals[name]).plain(), "to_none": ratio(journals, name, _NO_JOURNAL).plain()}
        for name in _JOURNALS
    }
    pulls = _pulls(plan, yardsticks)
    section.tables.append(_table("A pull, milliseconds", pulls, _pull_rows()))
    section.figures["pull"] = _figures(pulls)
    noise = {"push": Stat.of(pushes[_COPY]).spread, "pull": Stat.of(pulls[_COPY]).spread}
    section.figures["noise"] = noise
    section.notes += [
        "Median (min–max); ratios are formed round by round. Each round has entries of its own, and the model is "
        "copied once before each measurement, so that no case finds its memory warm.",
        f"Noise: the same copy took up to ×{noise['push']:.1f} (pushes) and ×{noise['pull']:.1f} (pulls) its shortest "
        "time within this section.",
        "A push with a journal is written down, with its answer, before it is applied; one worker, so that no fsync is "
        "shared. The directory is on the disk of the working directory.",
        "On a real server parsing and decoding overlap with the arrival of the next chunk; here they are added up.",
        f"The top-k reply is selected with the default selector, {_TOPK_AFTER} pushes after the last one.",
    ]
    return section


class _Yardsticks:
    """A copy of the model and a bare ``index_add_``, on memory of their own."""

    def __init__(self, plan: Plan) -> None:
        self.theta = torch.zeros(plan.layout.size)
        self._source = torch.ones(plan.layout.size)
        self._target = torch.empty(plan.layout.size)

    def copy(self, _: int = 0) -> None:
        self._target.copy_(self._source)


def _pushes(plan: Plan, yardsticks: _Yardsticks) -> Rounds:
    plan.say("pushes")
    shard = InProcessShard(plan.layout, "exact")
    rng = np.random.default_rng(plan.seed)
    warmup = 2
    updates = [noise_push(plan.layout, plan.density, DEFAULT_DENSE_BELOW, rng) for _ in range(warmup + plan.rounds)]
    wires = [[message.SerializeToString() for message in shard.push_messages(update)] for update in updates]

    def everything(turn: int) -> dict[str, float]:
        watch = Stopwatch()
        with watch.part("parse"):
            messages = [pb.PushSparseRequest.FromString(data) for data in wires[turn]]
        with watch.part("decode"):
            head, segments = shard.read(messages)
        with watch.part("merge"):
            answer = shard.apply(head, segments)
        watch.move(answer.apply_nanoseconds / 1e9, "merge", "apply")
        return watch.parts

    def bare(turn: int) -> None:
        offsets = updates[turn].offsets
        assert offsets is not None
        yardsticks.theta.index_add_(0, offsets, updates[turn].values, alpha=-1)

    cases: dict[str, Case] = {_COPY: yardsticks.copy, _BARE: bare, _PUSH: everything}
    measured = interleave(cases, plan.rounds, warmup=warmup, before_each=yardsticks.copy, has_time=plan.has_time)
    same = bool(torch.equal(shard.model.theta, yardsticks.theta))
    shard.close()
    assert same, "the server's parameters differ from the bare index_add_"
    return measured


def _journals(plan: Plan, yardsticks: _Yardsticks) -> Rounds:
    plan.say("pushes with a journal")
    rng = np.random.default_rng(plan.seed + 2)
    warmup = 2
    updates = [noise_push(plan.layout, plan.density, DEFAULT_DENSE_BELOW, rng) for _ in range(warmup + plan.rounds)]

    def case(shard: InProcessShard) -> Case:
        wires = [[message.SerializeToString() for message in shard.push_messages(update)] for update in updates]

        def push(turn: int) -> None:
            messages = [pb.PushSparseRequest.FromString(data) for data in wires[turn]]
            shard.apply(*shard.read(messages), messages)

        return push

    with ExitStack() as stack:
        cases: dict[str, Case] = {}
        for name, fsync in _JOURNALS.items():
            settings: dict[str, object] = {}
            if fsync is not None:
                settings = {"data_dir": stack.enter_context(TemporaryDirectory(dir=Path.cwd())), "fsync": fsync}
            shard = stack.enter_context(closing(InProcessShard(plan.layout, "exact", **settings)))
            cases[name] = case(shard)
        return interleave(cases, plan.rounds, warmup=warmup, before_each=yardsticks.copy, has_time=plan.has_time)


def _journal_table(plan: Plan, rounds: Rounds) -> Table:
    rows = [
        (name, Stat.of(rounds[name]).milliseconds(), ratio(rounds, name, _NO_JOURNAL).ratio()) for name in _JOURNALS
    ]
    return Table(f"A push of {plan.density:.0%} and the journal", ("what", "ms", "to no journal"), rows)


def _pulls(plan: Plan, yardsticks: _Yardsticks) -> Rounds:
    plan.say("pulls")
    exact = InProcessShard(plan.layout, "exact")
    topk = InProcessShard(plan.layout, "topk", down_density=plan.density)
    topk.open_image()
    rng = np.random.default_rng(plan.seed + 1)
    rounds = plan.slow_rounds
    latest = noise_push(plan.layout, plan.density, DEFAULT_DENSE_BELOW, rng)

    def advance() -> None:
        nonlocal latest
        for _ in range(max(*OTHER_PUSHES, _TOPK_AFTER)):
            latest = noise_push(plan.layout, plan.density, DEFAULT_DENSE_BELOW, rng)
            exact.commit(latest)
            topk.commit(latest)

    def bare(_: int) -> None:
        assert latest.offsets is not None
        yardsticks.theta.index_add_(0, latest.offsets, latest.values, alpha=-1)

    def exact_pull(others: int) -> Case:
        def measure(_: int) -> dict[str, float]:
            watch = Stopwatch()
            with watch.part("diff"):
                reply = exact.pull(exact.model.version - others)
            with watch.part("encode"):
                list(reply.messages)
            return watch.parts

        return measure

    def topk_pull(_: int) -> dict[str, float]:
        watch = Stopwatch()
        with watch.part("diff"):
            reply = topk.pull_topk()
        with watch.part("encode"):
            list(reply.messages)
        return watch.parts

    cases: dict[str, Case] = {_COPY: yardsticks.copy, _BARE: bare}
    cases |= {f"exact, after {others}": exact_pull(others) for others in OTHER_PUSHES}
    cases[f"top-k, after {_TOPK_AFTER}"] = topk_pull
    advance()
    measured = interleave(cases, rounds, warmup=1, before_each=yardsticks.copy, tick=advance, has_time=plan.has_time)
    exact.close()
    topk.close()
    return measured


_PUSH_ROWS = {
    _COPY: _COPY,
    _BARE: _BARE,
    _PUSH: _PUSH,
    f"{_PUSH}.parse": "– parse protobuf",
    f"{_PUSH}.decode": "– decode, validate, checksum",
    f"{_PUSH}.merge": "– merge, hand to the apply thread",
    f"{_PUSH}.apply": "– apply and append to the ledger",
}


def _pull_rows() -> dict[str, str]:
    rows = {_COPY: _COPY, _BARE: _BARE}
    for case in (*(f"exact, after {others}" for others in OTHER_PUSHES), f"top-k, after {_TOPK_AFTER}"):
        rows[case] = case
        rows |= {f"{case}.{part}": f"– {text}" for part, text in _PARTS.items()}
    return rows


_PARTS = {"diff": "build the diff", "encode": "encode and serialise"}


def _table(title: str, rounds: Rounds, names: dict[str, str]) -> Table:
    rows = [
        (
            text,
            Stat.of(rounds[name]).milliseconds(),
            "" if name == _BARE else ratio(rounds, name, _BARE).ratio(),
            "" if name == _COPY else ratio(rounds, name, _COPY).ratio(),
        )
        for name, text in names.items()
    ]
    return Table(title, ("what", "ms", "to index_add_", "to a copy"), rows)


def _figures(rounds: Rounds) -> dict[str, object]:
    return {
        name: {
            "seconds": Stat.of(values).plain(),
            "to_index_add": ratio(rounds, name, _BARE).plain(),
            "to_copy": ratio(rounds, name, _COPY).plain(),
        }
        for name, values in rounds.items()
    }

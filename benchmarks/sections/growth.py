"""Section 5: what must not grow: the time of a push with the size of the model that it falls into."""

import numpy as np
import torch

from benchmarks.harness.section import Plan, Section, Table
from benchmarks.harness.timing import Case, Rounds, Stat, Stopwatch, interleave
from benchmarks.workload.layouts import noise_push, one_tensor
from benchmarks.workload.shard_server import InProcessShard
from pscore.model.sparse_slice import SparseSlice

KEY, TITLE = "growth", "Time of a push and a pull as the model grows"

_ENTRIES = 100_000
_DIFFS = (1, 4)


def run(plan: Plan) -> Section:
    """Push the same number of entries into models of different sizes."""
    section = Section(KEY, TITLE)
    sizes = (1_000_000, 10_000_000) if plan.quick else (1_000_000, 10_000_000, 50_000_000)
    plan.say(f"{len(sizes)} sizes")
    warmup, rng = 2, np.random.default_rng(plan.seed)
    cases: dict[str, Case] = {}
    shards = []
    for size in sizes:
        layout = one_tensor(size)
        shard = InProcessShard(layout, "exact")
        shards.append(shard)
        pushes = [noise_push(layout, _ENTRIES / size, 0, rng) for _ in range(warmup + plan.rounds)]
        cases |= _cases(shard, pushes, size)
    flush, source = torch.empty(25_000_000), torch.ones(25_000_000)

    def cool() -> None:
        flush.copy_(source)

    measured = interleave(cases, plan.rounds, warmup=warmup, before_each=cool, has_time=plan.has_time)
    for shard in shards:
        shard.close()
    _report(section, measured, sizes)
    return section


def _cases(shard: InProcessShard, pushes: list[SparseSlice], size: int) -> dict[str, Case]:
    theta = torch.zeros(size)

    def bare(turn: int) -> None:
        offsets = pushes[turn].offsets
        assert offsets is not None
        theta.index_add_(0, offsets, pushes[turn].values, alpha=-1)

    def push(turn: int) -> dict[str, float]:
        messages = shard.push_messages(pushes[turn])
        watch = Stopwatch()
        with watch.part("rest"):
            header, segments = shard.read(messages)
            answer = shard.apply(header, segments)
        watch.move(answer.apply_nanoseconds / 1e9, "rest", "apply")
        return watch.parts

    def pull(others: int) -> Case:
        def measure(_: int) -> None:
            shard.pull(max(0, shard.model.version - others))

        return measure

    return {f"bare/{size}": bare, f"push/{size}": push} | {f"diff{n}/{size}": pull(n) for n in _DIFFS}


def _report(section: Section, measured: Rounds, sizes: tuple[int, ...]) -> None:
    texts = {"bare": "bare index_add_", "push": "push: decode to apply"}
    texts |= {f"diff{n}": f"exact diff after {n} {'push' if n == 1 else 'pushes'}" for n in _DIFFS}
    names = {"bare": "bare/{}", "push": "push/{}", "apply": "push/{}.apply"} | {
        f"diff{n}": f"diff{n}/{{}}" for n in _DIFFS
    }
    texts["apply"] = "  of which apply"
    rows = []
    for key, pattern in names.items():
        stats = [Stat.of(measured[pattern.format(size)]) for size in sizes]
        first, last = (measured[pattern.format(size)] for size in (sizes[0], sizes[-1]))
        growth = Stat.of([b / a for a, b in zip(first, last, strict=True)])
        rows.append((texts[key], *(stat.milliseconds() for stat in stats), growth.ratio()))
        section.figures[key] = {
            "seconds": {str(size): stat.plain() for size, stat in zip(sizes, stats, strict=True)},
            "growth": growth.plain(),
        }
    heads = ("what, ms", *(f"n = {size / 1e6:.0f} M" for size in sizes), f"n ×{sizes[-1] // sizes[0]}")
    section.tables.append(Table(f"A push of {_ENTRIES:,} entries into models of different sizes", heads, rows))
    noise = max(Stat.of(measured[f"bare/{size}"]).spread for size in sizes)
    section.figures["noise"] = noise
    section.notes.append(
        f"Noise: the same bare index_add_ took up to ×{noise:.1f} its shortest time. "
        "Median (min–max); growth is formed round by round. What is left of growth is memory that no cache "
        "holds any more, as the bare index_add_ shows; longer gaps also take a wider code."
    )

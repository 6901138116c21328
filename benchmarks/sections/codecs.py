"""Section *bytes*: bits, time and error of every codec, on random supports and on those of a real training run."""

import math
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from benchmarks.harness import plots
from benchmarks.harness.section import Plan, Section, Table
from benchmarks.workload import captured
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs.format import Offsets, Values
from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.codecs.names import VALUE_CODECS
from pscore.wire.codecs.rice import RICE
from pscore.wire.codecs.values import VALUE_FORMATS

KEY, TITLE = "bytes", "Bits an entry, by codec"

_COUNT = 256 << 10
_DENSITIES = (0.3, 0.1, 0.01, 0.001)
_LARGEST_BITMAP = 1 << 25
_GIGABIT = 125e6
_CHUNK = 1 << 20


def run(plan: Plan) -> Section:
    """Write and read everything in every form."""
    section = Section(KEY, TITLE)
    repeats = 5 if plan.quick else 15
    generator = np.random.default_rng(plan.seed)
    plan.say("indices")
    _indices(section, generator, repeats)
    plan.say("indices of a training run")
    runs = {
        name: captured.train(make(plan.seed), 0.01, 100 if plan.quick else 400, plan.seed, "warm", keep_every=50)
        for name, make in captured.MODELS.items()
    }
    _clusters(section, generator, runs)
    plan.say("values")
    _values(section, generator, repeats, np.concatenate([each for run in runs.values() for each in run.values]))
    plan.say("whole pushes")
    _pushes(section, generator, repeats)
    section.notes += [
        "Entropy: what entries at random places need at least, H(ρ)/ρ; real supports cluster, and a code that sees it "
        "goes below.",
        f"{_COUNT:,} entries at a time; the fastest of {repeats} calls, because other work on the machine only adds. "
        "One thread.",
        "Training runs: what DGS at 1 % selects in every 50th step, tensors end to end (workload/captured.py).",
        "Errors are squared, relative to the squared values; what a codec takes away stays in the sender's residual.",
    ]
    return section


def random_support(density: float, generator: np.random.Generator) -> Offsets:
    """Entries at random places, the first at 0."""
    offsets: Offsets = np.cumsum(generator.geometric(density, _COUNT))
    return offsets - offsets[0]


def clustered_supports(generator: np.random.Generator) -> dict[str, Offsets]:
    """About 1 % of 16 Mi elements, in the clusters that layers make."""
    size = 1 << 24
    rows = np.exp(generator.normal(0, 1.2, size // 512)).repeat(512)
    runs = np.zeros(size, bool)
    starts = np.flatnonzero(generator.random(size - 4) < 0.0025)
    for place in range(4):
        runs[starts + place] = True
    part = generator.random(size) < 0.01
    part[1_000_000:1_060_000] = True
    masks = {
        "made: rows of different density": generator.random(size) < 0.01 * rows / rows.mean(),
        "made: runs of four": runs,
        "made: a dense tensor within": part,
    }
    return {name: np.flatnonzero(mask) for name, mask in masks.items()}


def entropy(density: float) -> float:
    """Bits an entry that entries at random places need."""
    return -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density


def _indices(section: Section, generator: np.random.Generator, repeats: int) -> None:
    supports = {density: random_support(density, generator) for density in _DENSITIES}
    rows = [("entropy", *(f"{entropy(density):.2f}" for density in _DENSITIES))]
    for index_format in INDEX_FORMATS.values():
        cells = []
        for density, offsets in supports.items():
            length = int(offsets[-1]) + 1
            if index_format.name == "bitmap" and length > _LARGEST_BITMAP:
                cells.append(f"{length / _COUNT:.0f}")
                continue
            data = index_format.encode(offsets, length)
            bits = 8 * len(data) / _COUNT
            write = _nanoseconds(lambda f=index_format, o=offsets, n=length: f.encode(o, n), _COUNT, repeats)
            read = _nanoseconds(lambda f=index_format, d=data, n=length: f.decode(d, _COUNT, n), _COUNT, repeats)
            cells.append(f"{bits:.2f} ({write:.1f} + {read:.1f} ns)")
            section.figures[f"{index_format.name}, random {density}"] = {
                "bits": bits,
                "to_entropy": bits / entropy(density),
                "write_nanoseconds": write,
                "read_nanoseconds": read,
            }
        rows.append((index_format.name, *cells))
    heads = ("random support: bits (write + read)", *(f"{density * 100:g} %" for density in _DENSITIES))
    section.tables.append(Table("Indices at random places", heads, rows))


def _clusters(section: Section, generator: np.random.Generator, runs: Mapping[str, captured.Run]) -> None:
    rows = []

    def add(name: str, supports: list[tuple[Offsets, int]]) -> None:
        """Add a row; ``auto`` is what the cost model writes for a slow link."""
        density = sum(offsets.size for offsets, _ in supports) / sum(size for _, size in supports)
        entries = sum(offsets.size for offsets, _ in supports)
        written = sum(len(RICE.encode(o - o[0], int(o[-1] - o[0]) + 1)) for o, _ in supports)
        bits = {"rice": 8 * written / entries}
        bits["auto"] = sum(8 * _index_bytes(offsets, size) for offsets, size in supports) / entries
        rows.append((name, f"{density:.2%}", f"{entropy(density):.2f}", *(f"{each:.2f}" for each in bits.values())))
        section.figures[name] = {"density": density, "entropy_if_random": entropy(density), "bits": bits}

    for name, offsets in clustered_supports(generator).items():
        add(name, [(offsets, 1 << 24)])
    for name, run in runs.items():
        for number, support in enumerate(run.supports, start=1):
            add(f"real: {name}, step {50 * number}", [support])
        add(f"real: {name}, all", run.supports)
    heads = ("support", "density", "entropy if random", "rice", "auto")
    section.tables.append(Table("Indices that cluster, bits an entry", heads, rows))


def _index_bytes(offsets: Offsets, size: int) -> int:
    segment = SparseSlice(Span(0, size), torch.from_numpy(offsets), torch.zeros(offsets.size))
    return sum(len(chunk.indices) for chunk, _ in frames.encode(segment, frames.WireForm(), chunk_bytes=1 << 20))


def _values(section: Section, generator: np.random.Generator, repeats: int, real: Values) -> None:
    size = 1 << 21
    noise = {
        "Laplace 1 %": generator.laplace(size=size),
        "normal 1 %": generator.normal(size=size),
        "Student t3 1 %": generator.standard_t(3, size=size),
    }
    samples = {
        name: each[np.abs(each) >= np.quantile(np.abs(each), 0.99)].astype(np.float32) for name, each in noise.items()
    } | {"training runs": real}
    timed = generator.laplace(size=_COUNT).astype(np.float32)
    rows = []
    for codec in VALUE_FORMATS.values():
        data, _ = codec.encode(timed)
        write = _nanoseconds(lambda f=codec: f.encode(timed), _COUNT, repeats)
        read = _nanoseconds(lambda f=codec, d=data: f.decode(d, _COUNT), _COUNT, repeats)
        errors = {}
        for name, values in samples.items():
            exact = values.astype(np.float64)
            errors[name] = float(((codec.encode(values)[1] - exact) ** 2).sum() / (exact**2).sum())
        bits = 8 * len(data) / _COUNT
        cells = (f"{error:.1e}" if error else "0" for error in errors.values())
        rows.append((codec.name, f"{bits:.2f}", f"{write:.1f} + {read:.1f}", *cells))
        section.figures[f"values {codec.name}"] = {"bits": bits, "errors": errors, "nanoseconds": write + read}
    heads = ("values", "bits", "write + read, ns", *samples)
    section.tables.append(Table("Values: relative squared error", heads, rows))


def _pushes(section: Section, generator: np.random.Generator, repeats: int) -> None:
    """Whole messages at 1 %: bits an entry, and the time to write and read them over that to send them."""
    offsets = random_support(0.01, generator)
    segment = SparseSlice(
        Span(0, int(offsets[-1]) + 1),
        torch.from_numpy(offsets),
        torch.from_numpy(generator.laplace(size=_COUNT).astype(np.float32)),
    )
    rows, bars = [], []
    for name, value in VALUE_CODECS.items():
        slow = sum(
            frames.wire_bytes(chunk) for chunk, _ in frames.encode(segment, frames.WireForm(value), chunk_bytes=_CHUNK)
        )
        bars.append((name, 8 * slow / _COUNT))
        form = frames.WireForm(value, link_bytes_per_second=_GIGABIT)
        chunks = [chunk for chunk, _ in frames.encode(segment, form, chunk_bytes=_CHUNK)]
        write = _nanoseconds(lambda f=form: list(frames.encode(segment, f, chunk_bytes=_CHUNK)), _COUNT, repeats)
        read = _nanoseconds(lambda c=chunks: [frames.decode(each, segment.span) for each in c], _COUNT, repeats)
        nbytes = sum(frames.wire_bytes(chunk) for chunk in chunks)
        sending = nbytes / _GIGABIT * 1e9 / _COUNT
        share = (write + read) / sending
        rows.append(
            (
                name,
                f"{8 * slow / _COUNT:.2f}",
                f"{8 * nbytes / _COUNT:.2f}",
                f"{write:.1f}",
                f"{read:.1f}",
                f"{sending:.1f}",
                f"×{share:.2f}",
            )
        )
        section.figures[f"push {name}"] = {
            "bits_on_a_slow_link": 8 * slow / _COUNT,
            "bits_at_1_gigabit": 8 * nbytes / _COUNT,
            "write_and_read_to_send_at_1_gigabit": share,
        }
    heads = (
        "push at 1 %",
        "bits, slow link",
        "bits, 1 Gbit/s",
        "write, ns",
        "read, ns",
        "send, ns",
        "write + read / send",
    )
    section.tables.append(Table("Whole pushes: bits an entry in all, and times at 1 Gbit/s", heads, rows))
    caption = "Messages of a push at 1 %, random places. The code of the DGS paper needs 128; int32 with fp32 64."
    section.plots.append(plots.bars("bits-an-entry", "Bits an entry by value type", caption, "bits", bars))


def _nanoseconds(call: Callable[[], object], count: int, repeats: int) -> float:
    """Fastest of several calls, for each entry."""
    fastest = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest * 1e9 / count

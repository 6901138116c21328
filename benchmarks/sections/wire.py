"""Section 1: bytes on the wire a step, both ways, against dense fp32."""

import math
from collections.abc import Iterable
from statistics import median

import numpy as np
import torch
from google.protobuf.message import Message

from benchmarks.harness.section import Plan, Section, Table
from benchmarks.workload.layouts import noise_push
from benchmarks.workload.shard_server import InProcessShard
from pscore.model.buffers import is_exchanged, packed_bytes
from pscore.selection import DEFAULT_DENSE_BELOW
from pscore.wire import frames

KEY, TITLE = "wire", "Bytes a step on the wire, against dense fp32"

OTHER_PUSHES = (1, 4, 16)
_BUFFER_PERIOD = 20


class Tally:
    """Adds up the messages of one stream."""

    def __init__(self, messages: Iterable[Message]) -> None:
        """Count everything, and entries, index bytes and value bytes of chunks."""
        self.bytes = self.entries = self.index_bytes = self.value_bytes = 0
        for message in messages:
            self.bytes += frames.wire_bytes(message)
            for chunk in message.chunks:  # type: ignore[attr-defined]
                self.entries += chunk.count
                self.index_bytes += len(chunk.indices)
                self.value_bytes += len(chunk.values)


def run(plan: Plan) -> Section:
    """Encode real messages and weigh them."""
    draws = 2 if plan.quick else 3
    tallies: dict[str, list[Tally]] = {}

    def add(name: str, messages: Iterable[Message]) -> None:
        tallies.setdefault(name, []).append(Tally(messages))

    exact = InProcessShard(plan.layout, "exact")
    topk = InProcessShard(plan.layout, "topk", down_density=plan.density)
    topk.open_image()
    rng = np.random.default_rng(plan.seed)
    percent = f"{plan.density:.0%}"
    for draw in range(draws):
        plan.say(f"draw {draw + 1} of {draws}")
        push = noise_push(plan.layout, plan.density, DEFAULT_DENSE_BELOW, rng)
        add(f"push, {percent} fp32", exact.push_messages(push))
        add(f"push, {percent} fp16", exact.push_messages(push, torch.float16))
        strict = noise_push(plan.layout, plan.density, 0, rng)
        add(f"push, {percent} fp32, small tensors not exempt", exact.push_messages(strict))
        for others in range(1, max(OTHER_PUSHES) + 1):
            other = noise_push(plan.layout, plan.density, DEFAULT_DENSE_BELOW, rng)
            exact.commit(other)
            topk.commit(other)
            if others in OTHER_PUSHES:
                reply = exact.pull(exact.model.version - others)
                add(f"exact pull after {others} {'push' if others == 1 else 'pushes'}", exact.pull_messages(reply))
        add(f"top-k pull, {percent}, after {max(OTHER_PUSHES)} pushes", topk.pull_messages(topk.pull_topk()))
    exact.close()
    topk.close()
    return _section(plan, tallies)


def _section(plan: Plan, tallies: dict[str, list[Tally]]) -> Section:
    section = Section(KEY, TITLE)
    rows = [("dense fp32, either way", f"{plan.layout.size:,}", _megabytes(plan.dense_bytes), "1", "0", "32", "")]
    for name, draws in tallies.items():
        size = median(tally.bytes for tally in draws)
        entries = median(tally.entries for tally in draws)
        index_bits = median(8 * tally.index_bytes / tally.entries for tally in draws)
        value_bits = median(8 * tally.value_bytes / tally.entries for tally in draws)
        spread = max(tally.bytes for tally in draws) / min(tally.bytes for tally in draws) - 1
        rows.append(
            (
                name,
                f"{entries:,.0f}",
                _megabytes(size),
                f"1 : {plan.dense_bytes / size:.1f}",
                f"{index_bits:.2f}",
                f"{value_bits:.0f}",
                f"±{50 * spread:.2f} %",
            )
        )
        section.figures[name] = {
            "bytes": {"median": size, "min": min(t.bytes for t in draws), "max": max(t.bytes for t in draws)},
            "entries": entries,
            "density": entries / plan.layout.size,
            "share_of_dense": size / plan.dense_bytes,
            "index_bits": index_bits,
            "value_bits": value_bits,
            "overhead_bytes": median(t.bytes - t.index_bytes - t.value_bytes for t in draws),
            "draws": len(draws),
        }
    buffer_bytes = packed_bytes(spec for spec in plan.layout.buffers if is_exchanged(spec))
    section.figures["dense_bytes"] = plan.dense_bytes
    section.figures["buffer_bytes_a_step"] = buffer_bytes / _BUFFER_PERIOD
    section.tables.append(
        Table(
            f"{plan.layout_name}, {plan.layout.size:,} parameters",
            ("stream", "entries", "MB", "to dense", "index bits", "value bits", "spread"),
            rows,
        )
    )
    small = sum(spec.numel for spec in plan.layout.parameters if spec.numel < DEFAULT_DENSE_BELOW)
    section.notes += [
        f"Tensors under {DEFAULT_DENSE_BELOW} elements (biases, norms: {small:,} elements) are sent whole by default, "
        f"so {plan.density:.0%} of the rest is {plan.density + small / plan.layout.size * (1 - plan.density):.2%} "
        "of the model.",
        "Indices are uniform noise, the hardest case for a gap code: at this density no code can spend fewer than "
        f"{_entropy_bits(plan.density):.2f} bits an index on them. Bytes are whole gRPC messages with their frames; "
        "HTTP/2 and TCP headers are not counted.",
        f"BatchNorm statistics add {buffer_bytes / 1e6:.2f} MB each way every {_BUFFER_PERIOD} steps "
        f"({buffer_bytes / _BUFFER_PERIOD / 1e3:.1f} kB a step).",
    ]
    return section


def _entropy_bits(density: float) -> float:
    """Bits an entry that the positions of a random subset of this density carry."""
    rest = 1 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.3f}"

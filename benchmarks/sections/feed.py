"""How many bytes a reader in bfloat16 of an fp32 run needs, beside the codes of others, one version behind or many."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from benchmarks.campaign import language
from benchmarks.campaign.text import Transformer, make_tiny
from benchmarks.harness.section import Plan, Section, Table
from benchmarks.workload.delta_codes import CODES, GAPS_AND_XOR, Words
from benchmarks.workload.followed_run import FollowedRun, Reply, followed_run

KEY, TITLE = "feed", "Bytes of a reader in bfloat16"

_DEVIATION = 0.02  # of synthetic weights
_RATE = 1e-6
_RATES = (3e-7, _RATE, 3e-6, 1e-5)  # of synthetic steps: normal, cut at three deviations, as Adam's nearly are
_REAL_RATES = (_RATE, 1e-5)
_LAGS = (1, 8, 64)
_LONG_LAG = 1000
_ANCHORS = (10, 25)  # versions between whole models, as grail and Fireworks have them
_PRETRAINING = (300, 1e-3)  # steps of AdamW, and their rate
_BATCH = 16


@dataclass(slots=True)
class _Behind:
    """What a reader needs that lacks some versions, and what others would send it."""

    words: Reply
    residues: Reply
    one_delta: int
    chain: int


@dataclass(slots=True)
class _Found:
    """A run: changed words of its first step, bytes of that by code, and of readers that are behind."""

    size: int
    changed: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    behind: dict[int, _Behind] = field(default_factory=dict)
    whole: int = 0


def run(plan: Plan) -> Section:
    """Measure synthetic steps, then those of a transformer."""
    section = Section(KEY, TITLE)
    size = 1 << (18 if plan.quick else 22)
    lags = _LAGS[:2] if plan.quick else _LAGS
    runs: dict[str, _Found] = {}
    for rate in (_RATE,) if plan.quick else _RATES:
        plan.say(f"synthetic steps at {rate:g}")
        behind = lags if rate == _RATE else (1,)
        runs[f"synthetic, {rate:g}"] = _measure(plan, *_synthetic(plan.seed, size, rate), behind)
    for rate in (_RATE,) if plan.quick else _REAL_RATES:
        plan.say(f"AdamW at {rate:g}")
        runs[f"transformer, AdamW at {rate:g}"] = _measure(plan, *_fine_tuning(plan, rate), lags)
    if not plan.quick and plan.has_time():
        plan.say(f"{_LONG_LAG} synthetic steps")
        runs["synthetic, 1e-06, a million weights"] = _measure(
            plan, *_synthetic(plan.seed, 1 << 20, _RATE), (*_LAGS, _LONG_LAG)
        )
    section.tables = [_bits(runs), _lags(runs)]
    section.figures = {
        name: {
            "changed": found.changed / found.size,
            "bits": {code: 8 * nbytes / found.changed for code, nbytes in _all_codes(found).items()},
            "of_dense": {
                str(lag): {"residues": each.residues.nbytes / found.whole, "words": each.words.nbytes / found.whole}
                for lag, each in found.behind.items()
            },
        }
        for name, found in runs.items()
    }
    section.notes += [
        "Bits a changed element: everything on the wire over the words that differ. Ours are whole replies of a "
        "server, with headers, checksums and gRPC's prefixes; the others' codes alone. Every version's digest is "
        "compared with the server's.",
        "A chain has one difference (gaps, XOR, zstd) a version; with anchors every k versions a reader takes the "
        "newest whole model (zstd) and the chain behind it, if that is less.",
        f"Synthetic: weights N(0, {_DEVIATION:g}), steps N(0, rate²). The transformer has "
        f"{'198,000' if plan.quick else '3.3 million'} parameters and was trained on the source of Python's library "
        f"for {_PRETRAINING[0]} steps before.",
    ]
    return section


def _measure(plan: Plan, values: torch.Tensor, updates: Iterator[torch.Tensor], lags: tuple[int, ...]) -> _Found:
    found = _Found(values.numel())
    with followed_run(values) as run:
        first, first_version = run.words(), run.version
        for _ in range(2 * len(lags)):  # the readers that are to be behind
            run.read(None, residues=False)
        before, chain = first, 0
        for step in range(1, max(lags) + 1):
            run.push(next(updates))
            after = run.words()
            chain += CODES[GAPS_AND_XOR](before, after)
            if step == 1:
                found.changed = int(np.count_nonzero(before != after))
                found.codes = {name: code(before, after) for name, code in CODES.items()}
                found.whole = 2 * found.size
            if step in lags:
                found.behind[step] = _behind(run, first, after, first_version, chain)
            elif step % 2:
                run.read(run.version - 1, residues=True)  # another reader, that keeps up
            before = after
            if step % 50 == 0:
                plan.say(f"{step} of {max(lags)} steps")
    return found


def _behind(run: FollowedRun, first: Words, now: Words, held: int, chain: int) -> _Behind:
    words, residues = (run.read(held, residues=residues) for residues in (False, True))
    return _Behind(words, residues, CODES[GAPS_AND_XOR](first, now), chain)


def _all_codes(found: _Found) -> dict[str, int]:
    one = found.behind[1]
    return found.codes | {"ours, words": one.words.nbytes, "ours, residues": one.residues.nbytes}


def _bits(runs: dict[str, _Found]) -> Table:
    names = list(_all_codes(next(iter(runs.values()))))
    rows = [
        (
            name,
            f"{found.changed / found.size:.2%}",
            *(f"{8 * nbytes / found.changed:.1f}" for nbytes in _all_codes(found).values()),
        )
        for name, found in runs.items()
    ]
    return Table("One version behind: bits a changed element", ("steps", "changed", *names), rows)


def _lags(runs: dict[str, _Found]) -> Table:
    rows = []
    for name, found in runs.items():
        for lag, each in found.behind.items():
            chain = each.chain / lag
            anchors = [min(each.chain, found.whole + lag % every * chain) for every in _ANCHORS]
            sizes = (each.residues.nbytes, each.words.nbytes, each.one_delta, each.chain, *anchors)
            rows.append((name, str(lag), *(f"{size / found.whole:.1%}" for size in sizes)))
    heads = ("steps", "behind", "ours, residues", "ours, words", "one difference by gaps, XOR, zstd", "a chain of them")
    return Table(
        "Versions behind: bytes, of those of the whole model in bfloat16",
        (*heads, *(f"anchors every {every}" for every in _ANCHORS)),
        rows,
    )


def _synthetic(seed: int, size: int, rate: float) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
    rng = np.random.default_rng(seed)
    values = torch.from_numpy((_DEVIATION * rng.standard_normal(size)).astype(np.float32))

    def updates() -> Iterator[torch.Tensor]:
        while True:
            yield torch.from_numpy((rate * np.clip(rng.standard_normal(size), -3, 3)).astype(np.float32))

    return values, updates()


def _fine_tuning(plan: Plan, rate: float) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
    """Return a trained transformer's values, and what AdamW takes from them step by step at another rate."""
    torch.manual_seed(plan.seed)
    model = make_tiny() if plan.quick else Transformer(256, 4, 8, language.WINDOW_BYTES)
    batches = language.batches(_BATCH, plan.seed, 0, 1)
    steps, first_rate = _PRETRAINING
    optimizer = torch.optim.AdamW(model.parameters(), lr=first_rate)
    for _ in range(steps):
        _step(model, optimizer, *next(batches))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def flat() -> torch.Tensor:
        return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    def updates() -> Iterator[torch.Tensor]:
        values = flat()
        while True:
            _step(model, optimizer, *next(batches))
            update = values - flat()
            yield update
            values = values - update  # as the server rounds it
            nn.utils.vector_to_parameters(values.clone(), model.parameters())

    return flat(), updates()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor, following: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(text).flatten(0, 1), following.flatten()).backward()
    optimizer.step()

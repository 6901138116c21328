"""The bytes that the section *feed* compares are those of the same change."""

import numpy as np
import torch

from benchmarks.workload.delta_codes import CODES, GAPS_AND_XOR
from benchmarks.workload.followed_run import followed_run


def words(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 16, count).astype(np.uint16)


def test_codes_need_more_bytes_for_more_changes_and_few_for_none():
    before = words(1 << 17)
    for name, code in CODES.items():
        sizes = []
        for changed in (0, 1 << 6, 1 << 10, 1 << 14):
            after = before.copy()
            after[: 8 * changed : 8] ^= 1
            sizes.append(code(before, after))
        assert sizes == sorted(sizes), name
        assert sizes[0] < 64, name
    assert CODES["int32, bf16"](before, before ^ 1) == 6 * before.size


def test_gaps_beyond_16_bits_are_counted():
    before = words(1 << 18)
    near, far = before.copy(), before.copy()
    near[:2] ^= 1
    far[[0, -1]] ^= 1
    assert CODES[GAPS_AND_XOR](before, far) > CODES[GAPS_AND_XOR](before, near)


def test_a_followed_run_counts_what_a_reader_gets():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    with followed_run(values) as run:
        before = run.words()
        assert (run.version, run.read(None, residues=False).entries) == (1, 5000)
        update = torch.zeros(5000)
        update[::10] = 1.0
        run.push(update)
        changed = int(np.count_nonzero(before != run.words()))
        found = run.read(1, residues=True)
        assert found.entries == changed > 400
        assert 0 < found.nbytes < run.read(None, residues=False).nbytes
        assert run.read(2, residues=True).entries == 0

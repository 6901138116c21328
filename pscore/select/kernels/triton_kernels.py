"""The Triton kernels of device selection, launched by :mod:`pscore.select.kernels.cuda`; importing this loads Triton.

One program works on one *block* of consecutive elements. A sift compares |x| with a threshold on the device and writes,
per block, the number of hits, their excess ``Σ(|x| − t)``, and the hits in ascending order into the block's *slot*,
whose capacity is a few times the expected number. ``settle`` reads the blocks' counts, accepts or moves the threshold,
and assigns each block its place in the output. ``emit`` moves the hits there; only a block with more hits than its slot
has room is read again.

No result depends on the order in which programs run, and no sum is taken by atomics: same input, same bits. Offsets are
int32. Kernels are launched with ``enable_fp_fusion=False``, which costs nothing where memory is the limit and gives the
bits of :mod:`pscore.select.kernels.reference`.
"""
# mypy: ignore-errors
# Triton compiles these functions: they are not typed Python.

import triton
import triton.language as tl

# Words of the header through which `settle` and the passes talk: int32 ...
DONE = tl.constexpr(0)  # 1: the last sift stands, and passes still to come return at once
HITS = tl.constexpr(1)  # entries above the threshold in the last sift
EMITTED = tl.constexpr(2)  # of these, how many fit
FIRST = tl.constexpr(3)  # rank of the hit at which filling starts
PASSES = tl.constexpr(4)  # sifts so far
# ... and, in a part of its own, fp32.
THRESHOLD = tl.constexpr(0)  # of the next sift, or of the one that stands
LOW = tl.constexpr(1)  # largest threshold with too many hits; negative: none seen
HIGH = tl.constexpr(2)  # smallest threshold with too few, or the largest |x|
BEFORE = tl.constexpr(3)  # threshold of the sift before the last


@triton.jit
def _store_hits(x, index, threshold, block, counts, excess, peaks, slot_offsets, slot_values, SLOT: tl.constexpr):
    magnitude = tl.abs(x)
    hit = magnitude > threshold  # never outside the tensor: x is 0 there, and no threshold is negative
    rank = tl.cumsum(hit.to(tl.int32), 0) - 1
    fits = hit & (rank < SLOT)
    place = block * SLOT + rank
    tl.store(slot_offsets + place, index, mask=fits)
    tl.store(slot_values + place, x, mask=fits)
    tl.store(counts + block, tl.sum(hit.to(tl.int32), 0))
    tl.store(excess + block, tl.sum(tl.where(hit, magnitude - threshold, 0.0), 0))
    tl.store(peaks + block, tl.max(magnitude, 0))


@triton.jit
def sift(
    a, gradient, parameters, momentum, scale, decay, factor,
    start, whole, real, counts, excess, peaks, slot_offsets, slot_values, n,
    OPENING: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Add the update to ``a`` where there is a gradient, and sift ``a``.

    Each element is read and written once. ``parameters`` is None without decay, ``momentum`` without momentum. An
    ``OPENING`` sift uses the threshold ``start``; any other the one in the header, and returns if that is settled.
    """
    if OPENING:
        threshold = tl.load(start)
    else:
        if tl.load(whole + DONE) != 0:
            return
        threshold = tl.load(real + THRESHOLD)
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    x = tl.load(a + index, mask=inside, other=0.0)
    if gradient is not None:
        step = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32) * scale
        if parameters is not None:
            step += tl.load(parameters + index, mask=inside, other=0.0).to(tl.float32) * decay
        if momentum is not None:
            step += tl.load(momentum + index, mask=inside, other=0.0) * factor
            tl.store(momentum + index, step, mask=inside)
        x += step
        tl.store(a + index, x, mask=inside)
    _store_hits(x, index, threshold, block, counts, excess, peaks, slot_offsets, slot_values, SLOT)


@triton.jit(do_not_specialize=["blocks", "k", "capacity"])
def settle(
    start, whole, real, counts, excess, peaks, places, blocks, k, capacity, tolerance, turn,
    OPENING: tl.constexpr, REMAINING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Judge the last sift, and either conclude or choose the threshold of the next one. A single program.

    The threshold moves by the tail secant: above ``t`` the number of hits falls like ``exp(−t/β)``, where β is the
    hits' mean excess, or, once two thresholds have been tried, what their counts say. Where that leads out of the
    bracket, bisect. Concluding writes to ``start`` where the next step begins, and to ``places`` the rank of each
    block's first hit.

    ``whole`` and ``real`` are the header. Where more hits than ``capacity`` are found, filling starts at the share
    ``turn`` of them. ``OPENING``: the last sift was the first of this step; ``REMAINING``: sifts still to be launched.
    """
    if OPENING:
        threshold = tl.load(start)
        low, high = -1.0, float("inf")
        before, hits_before, passes = threshold, 0, 1
    else:
        if tl.load(whole + DONE) != 0:
            return
        threshold = tl.load(real + THRESHOLD)
        low, high, before = tl.load(real + LOW), tl.load(real + HIGH), tl.load(real + BEFORE)
        hits_before = tl.load(whole + HITS)
        passes = tl.load(whole + PASSES) + 1

    hits = 0
    total = 0.0
    peak = 0.0
    for first in range(0, blocks, TILE):
        block = first + tl.arange(0, TILE)
        inside = block < blocks
        count = tl.load(counts + block, mask=inside, other=0)
        tl.store(places + block, hits + tl.cumsum(count, 0) - count, mask=inside)
        hits += tl.sum(count, 0)
        total += tl.sum(tl.load(excess + block, mask=inside, other=0.0), 0)
        peak = tl.maximum(peak, tl.max(tl.load(peaks + block, mask=inside, other=0.0), 0))

    found = hits.to(tl.float32)
    few = found < k * (1.0 - tolerance)
    many = found > k * (1.0 + tolerance)
    good = (few | many) == 0
    good = good | ((threshold <= 0.0) & (many == 0))  # there are not more: every non-zero has been found
    low = tl.where(many, threshold, low)
    high = tl.where(few, tl.minimum(threshold, peak), tl.minimum(high, peak))

    known = tl.maximum(found, 1.0)
    mean_excess = total / known
    if OPENING:
        slope = mean_excess
    else:
        fall = tl.log(tl.maximum(hits_before, 1).to(tl.float32)) - tl.log(known)
        usable = (hits_before > 0) & (hits_before != hits)
        slope = tl.where(usable, (threshold - before) / tl.where(usable, fall, 1.0), mean_excess)
    secant = threshold + slope * tl.log(known / k)
    floor = tl.maximum(low, 0.0)
    inside_bracket = (hits > 0) & (secant > floor) & (secant < high)
    # Where the tail says that there are not k at all, look at 0, once.
    scarce = (hits > 0) & (secant <= 0.0) & (low < 0.0)
    middle = tl.where(scarce, 0.0, (floor + high) * 0.5)
    onward = tl.where(inside_bracket, secant, tl.where(good, threshold, middle))

    tl.store(whole + HITS, hits)
    tl.store(whole + PASSES, passes)
    over = good | (REMAINING == 0)
    tl.store(whole + DONE, over.to(tl.int32))
    if over:
        emitted = tl.minimum(hits, capacity)
        rank = tl.minimum((turn * found).to(tl.int32), hits - 1)
        tl.store(whole + EMITTED, emitted)
        tl.store(whole + FIRST, tl.where(hits > capacity, rank, 0))
        tl.store(real + THRESHOLD, threshold)
        tl.store(start, onward)
    else:
        tl.store(real + THRESHOLD, onward)
        tl.store(real + LOW, low)
        tl.store(real + HIGH, high)
        tl.store(real + BEFORE, threshold)


@triton.jit
def _emit_hits(x, index, rank, hit, whole, offsets, values, a, masked, keep):
    """Write the hits whose rank lies in the window of those that fit, which may go round the end; see ``settle``."""
    first, emitted = tl.load(whole + FIRST), tl.load(whole + EMITTED)
    wrapped = tl.maximum(first + emitted - tl.load(whole + HITS), 0)
    ahead = rank - first
    chosen = hit & ((rank < wrapped) | ((ahead >= 0) & (ahead < emitted)))
    place = tl.where(ahead >= 0, wrapped + ahead, rank)
    tl.store(offsets + place, index, mask=chosen)
    tl.store(values + place, x, mask=chosen)
    tl.store(a + index, x * keep, mask=chosen)
    if masked is not None:
        tl.store(masked + index, tl.zeros_like(x), mask=chosen)


@triton.jit
def emit(
    a, whole, real, counts, places, slot_offsets, slot_values, offsets, values, masked, keep, n,
    BLOCK: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Move the hits to the output, sorted, as many as fit.

    Where one is moved, ``a`` becomes ``keep·value`` and ``masked``, which may be None, 0.
    """
    block = tl.program_id(0)
    count = tl.load(counts + block)
    place = tl.load(places + block)
    if count > SLOT:
        index = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(a + index, mask=index < n, other=0.0)
        hit = tl.abs(x) > tl.load(real + THRESHOLD)
        rank = place + tl.cumsum(hit.to(tl.int32), 0) - 1
        _emit_hits(x, index, rank, hit, whole, offsets, values, a, masked, keep)
    else:
        nth = tl.arange(0, SLOT)
        filled = nth < count
        value = tl.load(slot_values + block * SLOT + nth, mask=filled, other=0.0)
        offset = tl.load(slot_offsets + block * SLOT + nth, mask=filled, other=0)
        _emit_hits(value, offset, place + nth, filled, whole, offsets, values, a, masked, keep)

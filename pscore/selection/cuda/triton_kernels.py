"""The Triton kernels of :mod:`pscore.selection.cuda.launches`, which launches them; importing this loads Triton.

A launch covers all tensors of a table. Each tensor has a row of :data:`~pscore.selection.cuda.launches.ROW`, with its
addresses, and is cut into *pieces* of ``BLOCK`` elements: (row, first element), int64. One program works on one piece,
or on one row. Whether an element is taken is a bit of the *mask*, which has ``BLOCK / 32`` words a piece.

Atomics are integer sums, which no order changes, and floating-point sums have a fixed order: same input, same bits.
Kernels are launched with ``enable_fp_fusion=False``, which gives the bits of the host's loops.
"""
# mypy: ignore-errors
# Triton compiles these functions: they are not typed Python.

import triton
import triton.language as tl

from pscore.selection.cuda.launches import KINDS_BY_NAME, LINE, LINE_BYTES, ROW, TARGET

FLOAT16, BFLOAT16 = tl.constexpr(KINDS_BY_NAME["float16"]), tl.constexpr(KINDS_BY_NAME["bfloat16"])
# Places of a row's fields, in bytes.
ROW_BYTES = tl.constexpr(ROW.itemsize)
MEMORY, MOMENTUM, GRADIENT, PARAMETERS, LENGTH, ROOM, PIECE, PART_OF, ABOVE, WANTED, LEAST, MOST, FITS = (
    tl.constexpr(ROW.fields[name][1])
    for name in (
        "memory", "momentum", "gradient", "parameters", "length", "room", "piece", "part", "above", "wanted", "least",
        "most", "fits",
    )
)  # fmt: skip
SCALE, DECAY, FACTOR, RETAIN, RATE, UNIT, THRESHOLD, KEEP = (
    tl.constexpr(ROW.fields[name][1])
    for name in ("scale", "decay", "factor", "retain", "rate", "unit", "threshold", "keep")
)
GRADIENT_KIND, PARAMETER_KIND, WHOLE, MASKED, ALIGNED = (
    tl.constexpr(ROW.fields[name][1]) for name in ("gradient_kind", "parameter_kind", "whole", "masked", "aligned")
)
ENTRIES_OF_LINE, BYTES_OF_LINE = tl.constexpr(LINE), tl.constexpr(LINE_BYTES)
TARGET_BYTES = tl.constexpr(TARGET.itemsize)
TARGET_ADDRESS, MASTER, SHIFT_BY, KIND = (
    tl.constexpr(TARGET.fields[name][1]) for name in ("address", "master", "shift", "kind")
)


@triton.jit
def _integer(row, field: tl.constexpr):
    return tl.load((row + field).to(tl.pointer_type(tl.int64)))


@triton.jit
def _real(row, field: tl.constexpr):
    return tl.load((row + field).to(tl.pointer_type(tl.float32)))


@triton.jit
def _floats(address, first):
    """Return the place of an fp32 element."""
    return (address + 4 * first).to(tl.pointer_type(tl.float32))


@triton.jit
def _read(place, lane, inside, FULL: tl.constexpr):
    """Read a piece; of a ``FULL`` one, which is aligned, each thread four neighbours, whatever the dtype."""
    SIZE: tl.constexpr = 4 * place.dtype.element_ty.primitive_bitwidth // 8
    if FULL:
        return tl.load(tl.multiple_of(place + lane, [SIZE, SIZE]))
    else:
        return tl.load(place + lane, mask=inside, other=0)


@triton.jit
def _write(place, lane, x, inside, FULL: tl.constexpr):
    if FULL:
        tl.store(tl.multiple_of(place + lane, [16, 16]), x)
    else:
        tl.store(place + lane, x, mask=inside)


@triton.jit
def _as_fp32(address, kind, first, lane, inside, FULL: tl.constexpr):
    """Read a piece of a tensor of one of the known kinds."""
    if kind == FLOAT16:
        x = _read((address + 2 * first).to(tl.pointer_type(tl.float16)), lane, inside, FULL).to(tl.float32)
    elif kind == BFLOAT16:
        half = _read((address + 2 * first).to(tl.pointer_type(tl.int16)), lane, inside, FULL)
        x = (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = _read(_floats(address, first), lane, inside, FULL)
    return x


@triton.jit
def _ones(bits):
    """Return the number of 1 bits of int32 words."""
    bits = bits.to(tl.uint32, bitcast=True)
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _updated(row, first, lane, inside, clip, whole, FULL: tl.constexpr):
    """Carry out a row's recurrence for some elements from ``first`` on; return their memory."""
    memory, gradient = _integer(row, MEMORY), _integer(row, GRADIENT)
    if gradient == 0:
        x = _read(_floats(memory, first), lane, inside, FULL)
    else:
        kind = tl.load(row + GRADIENT_KIND)
        x = _real(row, SCALE) * (clip * _as_fp32(gradient, kind, first, lane, inside, FULL))
        parameters = _integer(row, PARAMETERS)
        if parameters != 0:
            kind = tl.load(row + PARAMETER_KIND)
            x += _real(row, DECAY) * _as_fp32(parameters, kind, first, lane, inside, FULL)
        factor = _real(row, FACTOR)
        if factor != 0:
            place = _floats(_integer(row, MOMENTUM), first)
            x = factor * _read(place, lane, inside, FULL) + x
            _write(place, lane, x, inside, FULL)
        x = _real(row, RATE) * x
        if memory != 0:
            x = _real(row, RETAIN) * _read(_floats(memory, first), lane, inside, FULL) + x
        if tl.load(row + WHOLE) != 0:
            _write(whole + _integer(row, ROOM) + first, lane, _real(row, UNIT) * x, inside, False)
        else:
            _write(_floats(memory, first), lane, x, inside, FULL)
    return x


@triton.jit
def _piece(
    row, number, first, clip, counts, excess, mask, whole, FULL: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr
):
    """Update a piece, part by part: a whole one would need more registers than there are."""
    WORDS: tl.constexpr = PART // 32
    word, column = tl.arange(0, WORDS), tl.arange(0, 32)[None, :]
    lane = word[:, None] * 32 + column
    left, threshold = _integer(row, LENGTH) - first, _real(row, THRESHOLD)
    count, above = tl.zeros((WORDS,), tl.int32), tl.zeros((WORDS, 32), tl.float32)
    for start in range(0, BLOCK, PART):
        inside = lane < left - start
        x = _updated(row, first + start, lane, inside, clip, whole, FULL)
        hit = (tl.abs(x) <= threshold) == 0  # so that NaN is above, and is noticed
        if not FULL:
            hit = hit & inside  # a threshold may be negative
        bits = tl.sum(hit.to(tl.int32) << column, 1)
        tl.store(mask + (number * BLOCK + start) // 32 + word, bits)
        count += _ones(bits)
        above += tl.where(hit, tl.abs(x) - threshold, 0.0)
    tl.store(counts + number, tl.sum(count, 0))
    tl.store(excess + number, tl.sum(tl.sum(above, 1), 0))


@triton.jit
def update(rows, pieces, unsound, clip, counts, excess, mask, whole, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Add the number at ``clip`` times the gradients to the memories, and mark what lies above each row's threshold.

    A row without a gradient is only looked through; a ``whole`` one is written to ``whole`` and its memory left alone.
    Each piece's number of marks goes to ``counts``, the sum of what they exceed the threshold by to ``excess``. If
    ``unsound`` is not 0 nothing is marked, and nothing changes.
    """
    number = tl.program_id(0).to(tl.int64)
    if tl.load(unsound) != 0:
        tl.store(counts + number, 0)
        tl.store(excess + number, 0.0)
        return
    row = rows + tl.load(pieces + 2 * number) * ROW_BYTES
    first, by = tl.load(pieces + 2 * number + 1), tl.load(clip)
    if (tl.load(row + ALIGNED) != 0) & (first + BLOCK <= _integer(row, LENGTH)):
        _piece(row, number, first, by, counts, excess, mask, whole, True, BLOCK, PART)
    else:
        _piece(row, number, first, by, counts, excess, mask, whole, False, BLOCK, PART)


@triton.jit
def settle(rows, parts, counts, excess, places, above, sums, TILE: tl.constexpr):
    """Add up a part's pieces: give each its place within the part, and the part's marks and excess to its row.

    A part is (row, first piece, pieces), int64, of at most ``TILE`` pieces. ``above`` gets its number of marks, which
    is added to the row's too, ``sums`` its excess.
    """
    part = tl.program_id(0).to(tl.int64)
    row, first = rows + tl.load(parts + 3 * part) * ROW_BYTES, tl.load(parts + 3 * part + 1)
    lane = tl.arange(0, TILE)
    inside = lane < tl.load(parts + 3 * part + 2)
    count = tl.load(counts + first + lane, mask=inside, other=0)
    tl.store(places + first + lane, tl.cumsum(count, 0) - count, mask=inside)
    total = tl.sum(count, 0)
    tl.store(above + part, total)
    tl.store(sums + part, tl.sum(tl.load(excess + first + lane, mask=inside, other=0.0).to(tl.float64), 0))
    tl.atomic_add((row + ABOVE).to(tl.pointer_type(tl.int64)), total.to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def arrange(rows, parts, count, above, begins, taken, thresholds, TILE: tl.constexpr):
    """Accept each row that has marked enough entries, and no more than fit; one program does so for ``count`` parts.

    ``taken`` becomes the number of its entries, or -1 if it is not accepted; ``begins`` the place of a part's first
    entry among those of all accepted rows, one behind the other.
    """
    before = tl.zeros((), tl.int64)
    for start in range(0, count, TILE):
        part = start + tl.arange(0, TILE)
        inside = part < count
        number = tl.load(parts + 3 * part, mask=inside, other=0)
        row = rows + number * ROW_BYTES
        total, threshold = _integer(row, ABOVE), _real(row, THRESHOLD)
        enough = (total >= _integer(row, LEAST)) | (threshold <= 0)  # at 0 there is no more to be had
        accepted = enough & (total <= _integer(row, FITS))
        here = tl.where(accepted & inside, tl.load(above + part, mask=inside, other=0), 0).to(tl.int64)
        tl.store(begins + part, before + tl.cumsum(here, 0) - here, mask=inside)
        before += tl.sum(here, 0)
        leads = inside & (tl.load(parts + 3 * part + 1, mask=inside, other=-1) == _integer(row, PIECE))
        tl.store(taken + number, tl.where(accepted, total, -1), mask=leads)
        tl.store(thresholds + number, threshold.to(tl.float64), mask=leads)


@triton.jit
def emit(
    rows, pieces, counts, places, begins, taken, mask, entries,
    BLOCK: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the marked entries of accepted rows to the lines of ``entries``, ascending: value, and place in the piece.

    Memories become ``keep·value`` there, and the momentum of a ``masked`` row without a surplus 0.
    """
    WORDS: tl.constexpr = PART // 32
    piece = tl.program_id(0).to(tl.int64)
    number = tl.load(pieces + 2 * piece)
    if (tl.load(taken + number) < 0) | (tl.load(counts + piece) == 0):
        return
    row, first = rows + number * ROW_BYTES, tl.load(pieces + 2 * piece + 1)
    room = tl.load(begins + _integer(row, PART_OF) + first // (BLOCK * TILE)) + tl.load(places + piece)
    memory, keep = _floats(_integer(row, MEMORY), first), _real(row, KEEP)
    clears = (tl.load(row + MASKED) != 0) & (tl.load(taken + number) <= _integer(row, MOST))
    word, column = tl.arange(0, WORDS), tl.arange(0, 32)
    for start in range(0, BLOCK, PART):
        bits = tl.load(mask + (piece * BLOCK + start) // 32 + word)
        each = _ones(bits)
        before = tl.cumsum(each, 0) - each
        lane = start + word[:, None] * 32 + column[None, :]
        hit = ((bits[:, None] >> column[None, :]) & 1) != 0
        place = room + before[:, None] + _ones(bits[:, None] & ((1 << column) - 1)[None, :])
        x = tl.load(memory + lane, mask=hit, other=0.0)
        line, within = entries + place // ENTRIES_OF_LINE * BYTES_OF_LINE, place % ENTRIES_OF_LINE
        tl.store(line.to(tl.pointer_type(tl.float32)) + within, x, mask=hit)
        inner = (line + 4 * ENTRIES_OF_LINE).to(tl.pointer_type(tl.int16)) + within
        tl.store(inner, lane.to(tl.int16), mask=hit)
        tl.store(memory + lane, keep * x, mask=hit)
        if clears:
            tl.store(_floats(_integer(row, MOMENTUM), first) + lane, tl.zeros_like(x), mask=hit)
        room += tl.sum(each, 0)


@triton.jit
def histogram(rows, pieces, search, bins, SHIFT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Count magnitudes by the digit of their bits from ``SHIFT`` on, of those that have the search's prefix.

    The bits of floating-point magnitudes are ordered as these are. ``search`` has (prefix, entries above all that have
    the prefix, whether a threshold is found) of each row, int64.
    """
    piece = tl.program_id(0).to(tl.int64)
    number = tl.load(pieces + 2 * piece)
    if tl.load(search + 3 * number + 2) != 0:
        return
    row, first = rows + number * ROW_BYTES, tl.load(pieces + 2 * piece + 1)
    lane = tl.arange(0, BLOCK)
    inside = lane < _integer(row, LENGTH) - first
    place = _floats(_integer(row, MEMORY), first)
    bits = tl.abs(tl.load(place + lane, mask=inside, other=0.0)).to(tl.int32, bitcast=True)
    SPAN: tl.constexpr = BINS << SHIFT
    alike = bits.to(tl.int64) // SPAN == tl.load(search + 3 * number) // SPAN
    counted = (bits > 0) & (bits <= 0x7F800000) & alike
    found = tl.histogram((bits >> SHIFT) & (BINS - 1), BINS, mask=counted)
    bin = tl.arange(0, BINS)
    tl.atomic_add(bins + number * 2048 + bin, found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit
def choose(rows, search, bins, SHIFT: tl.constexpr, BINS: tl.constexpr):
    """Set a row's threshold to an edge of a bin above which a number of entries lies that is accepted.

    Without such an edge the search goes on in the bin in which the entry of rank ``wanted`` lies. The bins are 0 then.
    """
    number = tl.program_id(0).to(tl.int64)
    if tl.load(search + 3 * number + 2) != 0:
        return
    row = rows + number * ROW_BYTES
    prefix, beyond = tl.load(search + 3 * number), tl.load(search + 3 * number + 1)
    bin = tl.arange(0, BINS)
    count = tl.load(bins + number * 2048 + bin)
    tl.store(bins + number * 2048 + bin, tl.zeros_like(count))
    from_edge = beyond + tl.sum(count, 0) - tl.cumsum(count, 0) + count
    reaches = from_edge >= _integer(row, WANTED)
    digit = tl.maximum(tl.sum(reaches.to(tl.int64), 0) - 1, 0)
    lower = tl.sum(tl.where(bin == digit, from_edge, 0), 0)
    upper = lower - tl.sum(tl.where(bin == digit, count, 0), 0)
    is_lower = lower <= _integer(row, MOST)
    found = is_lower | (upper >= _integer(row, LEAST))
    edge = (prefix + ((digit + tl.where(is_lower, 0, 1)) << SHIFT)).to(tl.int32)
    threshold = tl.maximum(edge - 1, 0).to(tl.float32, bitcast=True)
    tl.store((row + THRESHOLD).to(tl.pointer_type(tl.float32)), threshold, mask=found)
    tl.store(search + 3 * number, prefix + (digit << SHIFT))
    tl.store(search + 3 * number + 1, upper)
    tl.store(search + 3 * number + 2, found.to(tl.int64))


@triton.jit
def _as_bfloat16(x):
    """Round to the nearest number, of two the even one; return its bits."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def scatter(targets, pieces, offsets, values, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """Write values to tensors, or add them in fp32 to their ``master``, which each tensor follows.

    A piece is (target, first entry, entries), int64; ``offsets`` None: an entry is the neighbour of the one before.
    """
    piece = pieces + 3 * tl.program_id(0).to(tl.int64)
    target = targets + tl.load(piece) * TARGET_BYTES
    entry = tl.load(piece + 1) + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < tl.load(piece + 2)
    index = entry
    if offsets is not None:
        index = tl.load(offsets + entry, mask=inside, other=0)
    index += _integer(target, SHIFT_BY)
    y = tl.load(values + entry, mask=inside, other=0.0)
    if ADDS:
        master = _floats(_integer(target, MASTER), 0) + index
        y += tl.load(master, mask=inside, other=0.0)
        tl.store(master, y, mask=inside)
    address, kind = _integer(target, TARGET_ADDRESS), tl.load(target + KIND)
    if kind == FLOAT16:
        tl.store(address.to(tl.pointer_type(tl.float16)) + index, y.to(tl.float16), mask=inside)
    elif kind == BFLOAT16:
        tl.store(address.to(tl.pointer_type(tl.int16)) + index, _as_bfloat16(y), mask=inside)
    elif not ADDS:
        tl.store(address.to(tl.pointer_type(tl.float32)) + index, y, mask=inside)

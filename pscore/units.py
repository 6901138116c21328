"""Figures in words, and from words."""

import argparse
import math
import re
from contextlib import suppress

LONGEST_SECONDS = 366 * 24 * 3600.0
"""Of a deadline or a lease: far longer ones overflow in gRPC or in the system, and end at once."""


def human_bytes(count: float) -> str:
    """Write a number of bytes with a decimal unit."""
    if count < 0:
        return f"−{human_bytes(-count)}"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1} | {f"{unit}i": 1 << 10 * power for power, unit in enumerate("KMGT", 1)}
_BYTES |= {unit: 10 ** (3 * power) for power, unit in enumerate(("k", "M", "G", "T"), 1)}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_SIZE = re.compile(r"([0-9](?:_?[0-9])*)(?:\.([0-9]+))?([KMGT]i|[kMGT]|)B?")
_LONGEST_TEXT = 40

DURATION_FORM = "a number of seconds, or one with its unit: 500ms, 15s, 5m, 2h, 1d, 1h30m"
SIZE_FORM = "a number of bytes, or one with its unit: 64Ki, 512Mi, 1Gi (of 1024), or 64k, 500M, 1G (of 1000)"


def parse_seconds(text: str) -> float:
    """Read a duration: a plain number of seconds, or numbers with their units (``1h30m``). Raises ``ValueError``."""
    text = text.strip()
    if len(text) <= _LONGEST_TEXT:
        parts = _DURATION.findall(text)
        if parts and "".join(number + unit for number, unit in parts) == text:
            return sum(float(number) * _SECONDS[unit] for number, unit in parts)
        with suppress(ValueError):
            return float(text)
    raise ValueError(f"{text[:_LONGEST_TEXT]!r} is no duration: give {DURATION_FORM}")


def parse_bytes(text: str) -> int:
    """Read a size: a plain number of bytes, or a number with its unit (``1.5Gi``). Raises ``ValueError``."""
    text = text.strip()
    found = _SIZE.fullmatch(text) if len(text) <= _LONGEST_TEXT else None
    if found is not None and (found[3] or not found[2]):
        part: str = found[2] or ""
        divisor: int = 10 ** len(part)
        size, rest = divmod(int(found[1] + part) * _BYTES[found[3]], divisor)
        if not rest:
            return size
    raise ValueError(f"{text[:_LONGEST_TEXT]!r} is no size: give {SIZE_FORM}")


def seconds_or_zero(text: str) -> float:
    """Read a flag's duration in seconds, finite and at least 0; raises ``ArgumentTypeError``."""
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: give {DURATION_FORM}")
    return seconds


def positive_seconds(text: str) -> float:
    """Read a flag's duration in seconds, finite and above 0; raises ``ArgumentTypeError``."""
    seconds = seconds_or_zero(text)
    if not seconds:
        raise argparse.ArgumentTypeError("it must be above 0")
    return seconds

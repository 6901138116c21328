"""Figures in words, and from words."""

import argparse
import math

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


def seconds_or_zero(text: str) -> float:
    """Read a flag's number of seconds, finite and at least 0; raises ``ArgumentTypeError``."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def positive_seconds(text: str) -> float:
    """Read a flag's number of seconds, finite and above 0; raises ``ArgumentTypeError``."""
    seconds = seconds_or_zero(text)
    if not seconds:
        raise argparse.ArgumentTypeError("it must be above 0")
    return seconds

"""Figures in words."""


def human_bytes(count: float) -> str:
    """Write a number of bytes with a decimal unit."""
    if count < 0:
        return f"−{human_bytes(-count)}"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

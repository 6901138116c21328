"""Measured tables and figures inside a guide page, between two marks."""

import argparse
from collections.abc import Sequence
from pathlib import Path

_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"


def page(name: str) -> Path:
    """Return the page that a flag names; ``argparse.ArgumentTypeError`` before all runs if nothing can go into it."""
    path = Path(name)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    try:
        _around(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def into_page(page: Path, text: str, drawn: Sequence[Path]) -> None:
    """Put figures and tables into a page, between its two marks, in the place of what was there.

    Args:
        page: where to.
        text: the tables.
        drawn: the figures, in the page's own directory.

    Raises:
        ValueError: the page has no such marks.
    """
    before, after = _around(page)
    shown = "".join(f"![{path.stem.replace('-', ' ')}]({path.name})\n\n" for path in drawn)
    page.write_text(f"{before}{_BEGIN}\n\n{shown}{text}\n{_END}{after}", encoding="utf-8")


def _around(page: Path) -> tuple[str, str]:
    """Return what is before and after the marks of a page."""
    old = page.read_text(encoding="utf-8")
    if old.count(_BEGIN) != 1 or old.count(_END) != 1:
        raise ValueError(f"{page} needs one {_BEGIN} and one {_END}")
    return old.split(_BEGIN)[0], old.split(_END)[1]

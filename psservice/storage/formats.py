"""Marks of the data's formats, and the refusal of those that another release has written."""

import re
from pathlib import Path

from psservice.storage.files import StorageError

_MARK_BYTES = 8


class OtherReleaseError(StorageError):
    """Another release of psservice wrote the data, which no way of recovering may change or drop."""

    def __init__(self, path: Path, found: str, *, is_newer: bool, advice: str = "") -> None:
        self.is_newer = is_newer
        which = "a newer" if is_newer else "an earlier"
        if is_newer:
            advice = "start that release"
        advice = advice or "write the model with it (psservice replay), and begin with --init FILE"
        super().__init__(
            f"{path} was written by {which} release of psservice ({found}). Nothing was changed: {advice}. If no other "
            "release was ever here, the file is damaged: restore it from a copy"
        )


def require_mark(path: Path, data: bytes, ours: bytes, release: str = "", advice: str = "") -> None:
    """Raise :class:`OtherReleaseError` if a file begins with our mark, but with another number at its end.

    ``release`` is the release that the file names as its writer; ``advice`` is for data of an earlier release.
    """
    name = ours.rstrip(b"0123456789")
    found = re.fullmatch(re.escape(name) + rb"(\d+)", data[:_MARK_BYTES])
    if found is not None and data[:_MARK_BYTES] != ours:
        number, mine = int(found[1]), int(ours.removeprefix(name))
        what = f"{release + ', ' if release else ''}format {number}, this release reads {mine}"
        raise OtherReleaseError(path, what, is_newer=number > mine, advice=advice)

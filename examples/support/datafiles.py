"""Data that have to be there: what is missing is asked for with its path and format, what is damaged is named."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MissingDataError(FileNotFoundError):
    """Files are missing; the message says which, where, and how to get them."""


class DamagedDataError(ValueError):
    """A file's checksum is wrong; the message names the file."""


def require_files(folder: Path, md5s: Mapping[str, str], how: str) -> None:
    """Check that files are there, and are those that were published.

    Args:
        folder: where they should be.
        md5s: MD5 of each file, by its name.
        how: a sentence: what they are and how to get them.

    Raises:
        MissingDataError: files are missing.
        DamagedDataError: a file has another checksum.
    """
    missing = [name for name in md5s if not (folder / name).is_file()]
    if missing:
        raise MissingDataError(f"missing: {', '.join(str(folder / name) for name in missing)}. {how}")
    for name, expected in md5s.items():
        with (folder / name).open("rb") as stream:
            found = hashlib.file_digest(stream, "md5").hexdigest()
        if found != expected:
            raise DamagedDataError(f"{folder / name} is damaged: its MD5 is {found}, not {expected}. {how}")


def read_md5s(path: Path) -> dict[str, str]:
    """Read a file that ``md5sum`` has written; raises ``ValueError`` where it is not one."""
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        digest, _, name = line.partition("  ")
        if len(digest) != 32 or not name:
            raise ValueError(f"{path}, line {number}: not a line of md5sum: {line!r}")
        found[name] = digest
    return found


def expect_md5s(kind: Any, md5s: Mapping[str, str]) -> None:
    """Make one of torchvision's CIFAR classes expect other files than the published, of the same names.

    Raises:
        ValueError: a file has no sum.
    """
    missing = {name for name, _ in (*kind.train_list, *kind.test_list)} | {kind.meta["filename"]}
    missing -= md5s.keys()
    if missing:
        raise ValueError(f"no MD5 is given for {', '.join(sorted(missing))}; write it with md5sum")
    kind.train_list = [[name, md5s[name]] for name, _ in kind.train_list]
    kind.test_list = [[name, md5s[name]] for name, _ in kind.test_list]
    kind.meta = kind.meta | {"md5": md5s[kind.meta["filename"]]}

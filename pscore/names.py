"""Names that a peer has chosen: their limits, and their form in a terminal or a log."""

import os
import re

LONGEST_NAME = 256
"""Characters."""

LONGEST_TENSOR_NAME = 512
"""Characters."""

RESERVED_TENSOR_NAME = "__metadata__"
"""The header entry of a safetensors file: a tensor of that name could be written and never read."""

_LONGEST_SHOWN = 200
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a URL, also one from which ``Path`` has removed a slash."""
    return _URL.match(str(path)) is not None


def model_file_fault(path: str | os.PathLike[str]) -> str:
    """Return why a model cannot be written under a path's name; empty if it can be."""
    name = str(path)
    if is_url(name):
        return f"{name!r} is a URL; name a file on this machine"
    stem, suffix = os.path.splitext(name)
    if suffix.lower() in _PICKLED:
        return f"{name!r} is called like a pickle, and models are safetensors files; name it {stem}.safetensors"
    return ""


def is_name(text: str, longest: int = LONGEST_NAME) -> bool:
    """Tell whether a text is 1 to ``longest`` printable characters."""
    return 0 < len(text) <= longest and text.isprintable()


def tensor_name_fault(name: str) -> str:
    """Return the fault of a tensor's name or alias; empty if there is none."""
    if name == RESERVED_TENSOR_NAME:
        return f"a tensor cannot be called {name!r}: files of models use that name for themselves; rename it"
    if not is_name(name, LONGEST_TENSOR_NAME):
        return (
            f"a tensor is called {shown(name)!r}, which is no name: it must be 1 to {LONGEST_TENSOR_NAME} "
            "printable characters"
        )
    return ""


_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")


def escaped(text: str) -> str:
    """Return a text with unprintable characters escaped, so that none moves a terminal's cursor or begins a line."""
    if text.isprintable():
        return text
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0].isprintable() else ascii(found[0])[1:-1], text)


def shown(text: str, longest: int = _LONGEST_SHOWN) -> str:
    """Return a text for a message: escaped, and cut at ``longest``."""
    return escaped(text if len(text) <= longest else f"{text[:longest]}…")

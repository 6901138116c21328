"""The standard streams of a command."""

import os
import sys


def open_missing_streams() -> None:
    """Open the null device in place of each standard stream that the caller has closed (``2>&-``).

    Otherwise the next file or socket that is opened gets that number, and what a library in C writes to its stderr goes
    there; and ``print(file=None)`` writes an error to stdout. To be called before anything else is opened.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for the rest of the process

"""Commands that take something away ask first, if somebody is there to answer."""

import sys
from argparse import Namespace

from pscore.names import escaped

_YES = ("y", "yes")


def agreed(what: str, options: Namespace) -> bool:
    """Say what a command is about to do and ask whether it shall; without a terminal, or with ``--yes``, it shall.

    A refusal is said to stderr.
    """
    if options.yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print(f"{escaped(what)} Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in _YES:
        return True
    print("psservice: nothing was done", file=sys.stderr)
    return False

"""Scripts with which a shell completes the words of a command line."""

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "fish", "tcsh")

_PATHS = ("FILE", "DIR", "PATH", "PART")
"""Placeholders of values that name files."""


def add_completion(commands: Any) -> None:
    """Add the command ``completion SHELL`` to the subparsers of a program."""
    what = "print a script with which the shell completes commands and flags"
    completion = commands.add_parser("completion", help=what)
    completion.add_argument("shell", choices=SHELLS)


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script of a shell for a program and all of its commands."""
    import shtab

    _name_files(parser, shtab.FILE)
    return shtab.complete(parser, shell=shell)


def _name_files(parser: argparse.ArgumentParser, files: object) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _name_files(each, files)
        elif action.metavar in _PATHS:
            action.complete = files  # type: ignore[attr-defined]  # where shtab looks for it

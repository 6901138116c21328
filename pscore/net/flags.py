"""Flags of commands that call servers: which servers, and how the caller proves who it is. Workers have variables."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

ENDPOINTS = "PSSERVICE_ENDPOINTS"
"""Has the addresses of the servers that ``psservice``'s commands ask."""

SERVER = "PSCLIENT_SERVER"
"""Has the addresses of a worker's servers."""

_SECURITY = {
    "tls-ca": ("CA certificates (PEM) of the server; turns on TLS", Path),
    "tls-cert": ("own certificate (PEM), for mutual TLS", Path),
    "tls-key": ("its key (PEM)", Path),
    "token-file": ("file that holds a bearer token; or PSCLIENT_TOKEN", Path),
    "tls-server-name": ("name in the server's certificate, if the address has another", str),
}


def add_addresses(parser: argparse.ArgumentParser, help_: str, *variables: str, or_else: str = "") -> None:
    """Let a command take addresses; without any, they are those of the first of these variables that is set.

    ``or_else`` is a flag that asks no server: then there may be none, and :func:`named_addresses` reads them.
    """
    servers = _named_in(variables)
    parser.add_argument(
        "addresses",
        nargs="*" if servers or or_else else "+",
        default=[servers] if servers and not or_else else None,
        metavar="ADDRESS",
        help=f"{help_} ({', or else '.join(variables)}){', or ' + or_else if or_else else ''}",
    )


def named_addresses(named: Sequence[str], *variables: str) -> list[str]:
    """Return the addresses that a command was given, or those of the first variable that is set; there may be none."""
    return [*named] or [each for each in [_named_in(variables)] if each]


def _named_in(variables: Sequence[str]) -> str:
    return next(filter(None, map(os.environ.get, variables)), "")


def add_security(parser: argparse.ArgumentParser) -> None:
    """Let a command take certificates and a token; the defaults are in a worker's variables (``PSCLIENT_TLS_CA``)."""
    for flag, (what, kind) in _SECURITY.items():
        variable = f"PSCLIENT_{flag.upper().replace('-', '_')}"
        found, metavar = os.environ.get(variable), "FILE" if kind is Path else "NAME"
        default = kind(found) if found else None if kind is Path else ""
        parser.add_argument(f"--{flag}", type=kind, default=default, metavar=metavar, help=f"{what} ({variable})")

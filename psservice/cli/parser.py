"""The words of ``psservice``: commands, their flags, and what a flag accepts; ``serve`` reads its own."""

import argparse
from pathlib import Path
from typing import Any

from pscore.net.flags import ENDPOINTS, SERVER, add_addresses, add_security
from pscore.units import positive_seconds, seconds_or_zero
from pscore.version import __version__

_MOST_VERSION_DIGITS = 18  # always fits into 64 bits

_BELOW = """\
addresses:
  HOST:PORT of each shard, in any order; several in one word with commas, or as a range: ps-{0..3}.ps:50051;
  of any one shard of psservice serve --shards; or one name for all shards, looked up once: dns:///ps:50051;
  without any, those in PSSERVICE_ENDPOINTS, or else in PSCLIENT_SERVER, as a worker's

exit status:
  0  done, at every shard
  1  no shard can be reached; snapshot and restore: not all can be, and nothing was done
  2  wrong usage, or addresses that do not belong together; nothing was done
  3  refused by the server, or nothing of that name (a worker, a checkpoint)
  4  in part: done at some shards and not at others, or not yet
  74 the output could not be written, 130 interrupted, 141 nobody read the output: what was asked of the servers
     may be done
"""

_COMMANDS = {
    "status": ("show versions, workers and bytes of each shard", 10.0),
    "top": ("watch shards and workers; q ends it", 3.0),
    "workers": ("show the workers of all shards in one table", 10.0),
    "finish": ("end the run: pushes are refused, the final model is written", 10.0),
    "snapshot": ("take a checkpoint over all shards now", 300.0),
    "checkpoints": ("list the checkpoints that the shards keep, or delete one that has a name", 30.0),
    "restore": ("take the shards back to a version or a checkpoint; workers follow", 300.0),
    "drain": ("refuse new calls at the shards, finish those under way, take a last checkpoint", 300.0),
    "evict": ("end a worker's lease, and perhaps keep it out for a time", 10.0),
}
"""Commands for running servers: their help, and the deadline of their calls, seconds."""


def _version(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_VERSION_DIGITS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version, a whole number of 0 or more")
    return int(text)


def _name(text: str) -> str:
    """Read a name for a server; bytes that are no UTF-8 are lone surrogates here."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid UTF-8") from None
    if not text:
        raise argparse.ArgumentTypeError("it is empty, which is no name")
    return text


def _checkpoint_name(text: str) -> str:
    """Read a name for a checkpoint, which must not have the form of an id that a server draws."""
    from psservice.durability.checkpoints import place_of

    if place_of(text) is not None:
        raise argparse.ArgumentTypeError(f"{text!r} looks like an id that a server draws")
    return _name(text)


_BAN = "keep the worker out for so long (default 0: it may join again at once; also ends a ban); at most a week"
_INTERVAL = "between two frames (default 2)"
_SWITCH = {"action": "store_true"}
_FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "top": {
        "--once": {**_SWITCH, "help": "show one frame; the same if stdout is no terminal"},
        "--interval-seconds": {"type": positive_seconds, "default": 2.0, "metavar": "SECONDS", "help": _INTERVAL},
    },
    "snapshot": {
        "--name": {"type": _checkpoint_name, "metavar": "NAME", "help": "keep it under this name until it is deleted"}
    },
    "checkpoints": {"--delete": {"type": _name, "metavar": "NAME", "help": "delete this one"}},
    "restore": {
        "--version": {"type": _version, "metavar": "V", "help": "version of each shard to go back to"},
        "--checkpoint": {"type": _name, "metavar": "ID", "help": "checkpoint to go back to"},
    },
    "drain": {
        "--stop": {**_SWITCH, "help": "then end the processes, as SIGTERM does"},
        "--undo": {**_SWITCH, "help": "open the shards again"},
    },
    "evict": {"--ban-seconds": {"type": seconds_or_zero, "default": 0.0, "metavar": "N", "help": _BAN}},
}
"""The flags that only one command has."""


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; ``serve`` is there for ``--help`` only."""
    parser = argparse.ArgumentParser(prog="psservice", description="A sparse parameter server for PyTorch.")
    parser.add_argument("--version", action="version", version=f"psservice {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", help="run a server (see psservice serve --help)")
    relay = "serve another server's versions to readers: psservice relay --of HOST:PORT, with the flags of serve"
    commands.add_parser("relay", help=relay)
    form = argparse.RawDescriptionHelpFormatter
    for name, (what, seconds) in _COMMANDS.items():
        description = f"{what[0].upper()}{what[1:]}."
        _add_flags(
            commands.add_parser(name, help=what, description=description, epilog=_BELOW, formatter_class=form),
            name,
            seconds,
        )
    health = commands.add_parser("health", help="ask a server's health port; exit status 0 if it serves, 1 if not")
    where = "HOST:PORT: its --health-listen, or its --listen without TLS"
    health.add_argument("address", metavar="ADDRESS", help=where)
    health.add_argument(
        "--timeout", type=positive_seconds, default=5.0, metavar="SECONDS", help="for an answer (default 5)"
    )
    replay = commands.add_parser("replay", help="write the model at any version that a data directory covers")
    where = "the servers' --data-dir, with every shard's folder"
    replay.add_argument("directory", type=Path, metavar="DIR", help=where)
    target = replay.add_mutually_exclusive_group()
    target.add_argument("--to", type=_version, metavar="VERSION", help="version of each shard (default: the last)")
    target.add_argument("--checkpoint", default="", metavar="ID", help="checkpoint instead of a version")
    replay.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    commands.add_parser("compile", help="compile a server's loops for this machine now, so that no first push waits")
    return parser


def _add_flags(parser: argparse.ArgumentParser, name: str, seconds: float) -> None:
    """Add the flags of a command for running servers: its own, and those that all of them have."""
    if name == "evict":
        parser.add_argument("worker", type=_name, metavar="WORKER", help="its name, as psservice workers shows it")
    add_addresses(parser, "HOST:PORT of each shard", ENDPOINTS, SERVER)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_security(parser)
    help_ = f"deadline of each call (default {seconds:g})"
    parser.add_argument("--timeout", type=positive_seconds, default=seconds, metavar="SECONDS", help=help_)
    is_exclusive = name in ("restore", "drain")
    group = parser.add_mutually_exclusive_group(required=name == "restore") if is_exclusive else parser
    for flag, own in _FLAGS.get(name, {}).items():
        group.add_argument(flag, **own)

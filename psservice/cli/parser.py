"""The words of ``psservice``: commands, their flags, and what a flag accepts; ``serve`` reads its own."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pscore.completion import add_completion
from pscore.net.flags import ENDPOINTS, SERVER, add_addresses, add_security
from pscore.units import positive_seconds, seconds_or_zero
from pscore.version import __version__

_MOST_VERSION_DIGITS = 18  # always fits into 64 bits
_MOST_COUNT_DIGITS = 6
_MOST_DAYS = 36525.0

_BELOW = """\
addresses:
  HOST:PORT of each shard, in any order; several in one word with commas, or as a range: ps-{0..3}.ps:50051;
  of any one shard of psservice serve --shards; or one name for all shards, looked up once: dns:///ps:50051;
  without any, those in PSSERVICE_ENDPOINTS, or else in PSCLIENT_SERVER, as a worker's

exit status:
  0  done, at every shard
  1  no shard can be reached; checkpoint and restore: not all can be, and nothing was done
  2  wrong usage, or addresses that do not belong together; nothing was done
  3  refused by the server or by you, or nothing of that name (a worker, a checkpoint), or a backup that is not whole
  4  in part: done at some shards and not at others, or not yet
  74 the output could not be written, 130 interrupted, 141 nobody read the output: what was asked of the servers
     may be done
"""

_COMMANDS = {
    "status": ("show versions, workers and bytes of each shard", 10.0),
    "top": ("watch shards and workers; q ends it", 3.0),
    "workers": ("show the workers of all shards in one table", 10.0),
    "finish": ("end the run: pushes are refused, the final model is written", 10.0),
    "restore": ("take the shards back to a version or a checkpoint; workers follow", 300.0),
    "drain": ("refuse new calls at the shards, finish those under way, take a last checkpoint", 300.0),
    "evict": ("end a worker's lease, and perhaps keep it out for a time", 10.0),
    "promote": ("have standbys serve in the place of the server that they stand by for", 120.0),
}
"""Commands for running servers: their help, and the deadline of their calls, seconds."""

_CHECKPOINT_COMMANDS = {
    "create": ("take a checkpoint over all shards now", 300.0),
    "list": ("list the checkpoints that the shards keep, or the backups of a store", 30.0),
    "show": ("show one checkpoint, or one backup", 3600.0),
    "pin": ("keep a checkpoint that has no name until it is deleted", 30.0),
    "delete": ("delete a checkpoint that has a name or is pinned, or a backup", 30.0),
    "export": ("write a checkpoint of all shards to a store, as a backup", 3600.0),
}
"""Commands after ``checkpoint``; ``import`` calls no server."""

_STORED = ("list", "show", "delete")
"""Those that ask a store instead, with ``--from``."""


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
    from psservice.durability.checkpoints import NEW, place_of

    if place_of(text) is not None:
        raise argparse.ArgumentTypeError(f"{text!r} looks like an id that a server draws")
    if text == NEW:
        raise argparse.ArgumentTypeError(f"{text!r} is the word for a checkpoint that is taken now")
    return _name(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= _MOST_COUNT_DIGITS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _positive_count(text: str) -> int:
    count = _count(text)
    if not count:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return count


def _positive_days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 0 < days <= _MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days above 0")
    return days


_BAN = "keep the worker out for so long (default 0: it may join again at once; also ends a ban); at most a week"
_INTERVAL = "between two frames (default 2)"
_SWITCH = {"action": "store_true"}
_YES = {"--yes": {**_SWITCH, "help": "do not ask; without a terminal nothing is asked anyway"}}
_STORE = "a folder of backups: /backups, s3://BUCKET/FOLDER, or what else fsspec opens"
_OLD = "backups of this run whose checkpoints nobody has named,"
_FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "top": {
        "--once": {**_SWITCH, "help": "show one frame; the same if stdout is no terminal"},
        "--interval-seconds": {"type": positive_seconds, "default": 2.0, "metavar": "SECONDS", "help": _INTERVAL},
    },
    "create": {
        "--name": {"type": _checkpoint_name, "metavar": "NAME", "help": "keep it under this name until it is deleted"}
    },
    "show": {"--verify": {**_SWITCH, "help": "read all of its files, and say whether they are whole"}},
    "export": {
        "--to": {"dest": "store", "required": True, "type": _name, "metavar": "URL", "help": _STORE},
        "--keep": {"type": _positive_count, "metavar": "N", "help": f"then remove {_OLD} but the last N"},
        "--keep-days": {
            "type": _positive_days,
            "metavar": "D",
            "help": f"then remove {_OLD} that are older; with --keep those that neither keeps",
        },
    },
    "restore": {
        "--version": {"type": _version, "metavar": "V", "help": "version of each shard to go back to"},
        "--checkpoint": {"type": _name, "metavar": "ID", "help": "checkpoint to go back to"},
    },
    "drain": {
        "--stop": {**_SWITCH, "help": "then end the processes, as SIGTERM does"},
        "--undo": {**_SWITCH, "help": "open the shards again"},
    },
    "promote": {"--force": {**_SWITCH, "help": "even though that server still answers"}},
    "evict": {"--ban-seconds": {"type": seconds_or_zero, "default": 0.0, "metavar": "N", "help": _BAN}},
}
"""The flags that only one command has."""

_DRY_RUN = {"--dry-run": {**_SWITCH, "help": "say what would be done, after reading all of it, and change nothing"}}
_MORE_FLAGS: dict[str, dict[str, dict[str, Any]]] = {"finish": _YES, "restore": {**_DRY_RUN, **_YES}, "delete": _YES}
"""Flags that go with all others of a command."""


def command_parser(flags_of: Callable[[str], argparse.ArgumentParser] | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    ``serve``, ``relay`` and ``standby`` read their own flags, and are here for ``--help``; with ``flags_of``, which
    returns the parser of the flags of one of them, they have their flags here too.
    """
    parser = argparse.ArgumentParser(prog="psservice", description="A sparse parameter server for PyTorch.")
    parser.add_argument("--version", action="version", version=f"psservice {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = "run a server (see psservice serve --help)"
    relay = "serve another server's versions to readers: psservice relay --of HOST:PORT, with the flags of serve"
    standby = (
        "stand by for another server, with its journal, and serve in its place once told to: psservice standby --of "
        "HOST:PORT, with the flags of serve"
    )
    for name, what in (("serve", serve), ("relay", relay), ("standby", standby)):
        commands.add_parser(name, help=what, parents=[flags_of(name)] if flags_of else [], add_help=flags_of is None)
    form = argparse.RawDescriptionHelpFormatter
    for name, (what, seconds) in _COMMANDS.items():
        description = f"{what[0].upper()}{what[1:]}."
        _add_flags(
            commands.add_parser(name, help=what, description=description, epilog=_BELOW, formatter_class=form),
            name,
            seconds,
        )
    _add_checkpoint(commands)
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
    add_completion(commands)
    commands.add_parser("compile", help="compile a server's loops for this machine now, so that no first push waits")
    return parser


def _add_checkpoint(commands: Any) -> None:
    """Add ``checkpoint`` and the commands after it."""
    what = "checkpoints of all shards, and backups of them in a store"
    parser = commands.add_parser("checkpoint", help=what, description=f"{what[0].upper()}{what[1:]}.")
    acts = parser.add_subparsers(dest="act", required=True, metavar="COMMAND")
    form = argparse.RawDescriptionHelpFormatter
    for name, (what, seconds) in _CHECKPOINT_COMMANDS.items():
        description = f"{what[0].upper()}{what[1:]}."
        act = acts.add_parser(name, help=what, description=description, epilog=_BELOW, formatter_class=form)
        if name not in ("create", "list"):
            new = "; new: take one now" if name == "export" else ""
            act.add_argument("checkpoint", type=_name, metavar="ID", help=f"its id or name{new}")
        _add_flags(act, name, seconds)
    what = "put a backup into an empty data directory, from which servers start"
    act = acts.add_parser("import", help=what, description=f"{what[0].upper()}{what[1:]}.")
    act.add_argument("checkpoint", type=_name, metavar="ID", help="its id or name, as checkpoint list --from shows it")
    act.add_argument("--from", dest="store", required=True, type=_name, metavar="URL", help=_STORE)
    where = "the servers' --data-dir, without the folders of the shards"
    act.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help=where)
    act.add_argument("--shard", type=_count, metavar="I", help="of this shard only, for a machine that serves one")
    _add_output(act)


def _add_output(parser: argparse.ArgumentParser) -> None:
    forms = ("table", "json", "yaml")
    parser.add_argument("-o", "--output", choices=forms, default="table", help="print tables and words, JSON or YAML")


def _add_flags(parser: argparse.ArgumentParser, name: str, seconds: float) -> None:
    """Add the flags of a command for running servers: its own, and those that all of them have."""
    if name == "evict":
        parser.add_argument("worker", type=_name, metavar="WORKER", help="its name, as psservice workers shows it")
    add_addresses(parser, "HOST:PORT of each shard", ENDPOINTS, SERVER, or_else="--from" if name in _STORED else "")
    if name in _STORED:
        parser.add_argument(
            "--from", dest="store", type=_name, metavar="URL", help=f"ask no server, but a store: {_STORE}"
        )
    _add_output(parser)
    add_security(parser)
    help_ = f"deadline of each call (default {seconds:g})"
    parser.add_argument("--timeout", type=positive_seconds, default=seconds, metavar="SECONDS", help=help_)
    is_exclusive = name in ("restore", "drain")
    group = parser.add_mutually_exclusive_group(required=name == "restore") if is_exclusive else parser
    for flag, own in _FLAGS.get(name, {}).items():
        group.add_argument(flag, **own)
    for flag, own in _MORE_FLAGS.get(name, {}).items():
        parser.add_argument(flag, **own)

"""``psservice``: serve, health, replay, and the commands for running servers."""

import argparse
import gc
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pscore.names import escaped
from pscore.version import __version__

if TYPE_CHECKING:
    from psservice.app.shared_health import SharedHealth
    from psservice.settings import ServerSettings

EXIT_DONE, EXIT_UNABLE, EXIT_USAGE = 0, 1, 2
EXIT_INTERRUPTED, EXIT_NO_READER = 128 + signal.SIGINT, 128 + 13  # as shells have it; not every system has SIGPIPE
EXIT_FAILED = 70  # EX_SOFTWARE of sysexits.h
EXIT_NOT_WRITTEN = 74  # EX_IOERR of sysexits.h

_MOST_VERSION_DIGITS = 18  # always fits into 64 bits
_SEE_STATUS = "psservice status shows what was done"

_STATUSES = """\
exit status:
  0  done, at every shard
  1  no shard can be reached; snapshot and restore: not all can be, and nothing was done
  2  wrong usage, or addresses that do not belong together; nothing was done
  3  refused by the server, or nothing of that name (a worker, a checkpoint)
  4  in part: done at some shards and not at others, or not yet
  74 the output could not be written, 130 interrupted, 141 nobody read the output: what was asked of the servers
     may be done
"""

_ADDRESSES = """\
addresses:
  HOST:PORT of each shard, in any order; several in one word with commas, or as a range: ps-{0..3}.ps:50051;
  of any one shard of psservice serve --shards; or one name for all shards, looked up once: dns:///ps:50051
"""


def _seconds(text: str) -> float:
    seconds = _seconds_or_none(text)
    if not seconds:
        raise argparse.ArgumentTypeError("it must be above 0")
    return seconds


def _seconds_or_none(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


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
    from psservice.cluster.checkpoints import place_of

    if place_of(text) is not None:
        raise argparse.ArgumentTypeError(f"{text!r} looks like an id that a server draws")
    return _name(text)


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


_BAN = "keep the worker out for so long (default 0: it may join again at once; also ends a ban); at most a week"
_FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "top": {
        "--once": {"action": "store_true", "help": "show one frame; the same where stdout is no terminal"},
        "--interval-seconds": {
            "type": _seconds,
            "default": 2.0,
            "metavar": "SECONDS",
            "help": "between two frames (default 2)",
        },
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
        "--stop": {"action": "store_true", "help": "then end the processes, as SIGTERM does"},
        "--undo": {"action": "store_true", "help": "open the shards again"},
    },
    "evict": {"--ban-seconds": {"type": _seconds_or_none, "default": 0.0, "metavar": "N", "help": _BAN}},
}
"""The flags that only one command has."""

_SERVER_MODULES = ("grpc_health", "grpc_reflection", "prometheus_client", "pythonjsonlogger")  # the extra [server]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 unreachable or unable, 2 usage, 3 refused, 4 in part."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _SERVER_MODULES:
            raise
        print(f"psservice: {error.name} is not installed; run: pip install 'sparseps[server]'", file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    if words[:1] == ["serve"]:
        return _serve(words[1:])
    parser = _parser()
    options = parser.parse_args(words)
    if options.command == "replay":
        return _replay(options)
    if options.command == "health":
        return _health(options)
    return _for_a_reader(lambda: _operate(options, parser.error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="psservice", description="A sparse parameter server for PyTorch.")
    parser.add_argument("--version", action="version", version=f"psservice {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", help="run a server (see psservice serve --help)")
    for name, (what, seconds) in _COMMANDS.items():
        _add_command(commands.add_parser, name, what, seconds)
    health = commands.add_parser("health", help="ask a server's health port; exit status 0 if it serves, 1 if not")
    health.add_argument(
        "address", metavar="ADDRESS", help="HOST:PORT: its --health-listen, or its --listen without TLS"
    )
    health.add_argument("--timeout", type=_seconds, default=5.0, metavar="SECONDS", help="for an answer (default 5)")
    replay = commands.add_parser("replay", help="write the model at any version that a data directory covers")
    replay.add_argument(
        "directory", type=Path, metavar="DIR", help="the servers' --data-dir, with every shard's folder"
    )
    target = replay.add_mutually_exclusive_group()
    target.add_argument("--to", type=_version, metavar="VERSION", help="version of each shard (default: the last)")
    target.add_argument("--checkpoint", default="", metavar="ID", help="checkpoint instead of a version")
    replay.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    return parser


def _add_command(add: Callable[..., argparse.ArgumentParser], name: str, what: str, seconds: float) -> None:
    """Add a command for running servers: its own flags, and those that all of them have."""
    description, epilog = f"{what[0].upper()}{what[1:]}.", f"{_ADDRESSES}\n{_STATUSES}"
    form = argparse.RawDescriptionHelpFormatter
    parser = add(name, help=what, description=description, epilog=epilog, formatter_class=form)
    if name == "evict":
        parser.add_argument("worker", type=_name, metavar="WORKER", help="its name, as psservice workers shows it")
    parser.add_argument("addresses", nargs="+", metavar="ADDRESS", help="HOST:PORT of each shard")
    parser.add_argument("--json", action="store_true", help="print JSON")
    for flag, what, metavar in (  # the environment is that of the workers
        ("tls-ca", "CA certificates (PEM) of the server; turns on TLS", "FILE"),
        ("tls-cert", "own certificate (PEM), for mutual TLS", "FILE"),
        ("tls-key", "its key (PEM)", "FILE"),
        ("token-file", "file that holds a bearer token; or PSCLIENT_TOKEN", "FILE"),
        ("tls-server-name", "name in the server's certificate, where the address has another", "NAME"),
    ):
        variable = f"PSCLIENT_{flag.upper().replace('-', '_')}"
        kind, empty = (Path, None) if metavar == "FILE" else (str, "")
        default = kind(os.environ[variable]) if os.environ.get(variable) else empty
        parser.add_argument(f"--{flag}", type=kind, default=default, metavar=metavar, help=f"{what} ({variable})")
    help_ = f"deadline of each call (default {seconds:g})"
    parser.add_argument("--timeout", type=_seconds, default=seconds, metavar="SECONDS", help=help_)
    is_exclusive = name in ("restore", "drain")
    group = parser.add_mutually_exclusive_group(required=name == "restore") if is_exclusive else parser
    for flag, own in _FLAGS.get(name, {}).items():
        group.add_argument(flag, **own)


def _for_a_reader(command: Callable[[], int]) -> int:
    """Run a command that prints, and report what its terminal, pipe or file does not take by the exit status."""
    if sys.stderr is None:  # closed: print() would take stdout instead, which may be JSON
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a dash shows a question mark
    try:
        status = command()
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # as of `| head -1`
        _drop_output()
        return EXIT_NO_READER
    except OSError as error:  # a full disk; reading has errors of its own
        _drop_output()
        print(f"psservice: the output could not be written: {error}; {_SEE_STATUS}", file=sys.stderr)
        return EXIT_NOT_WRITTEN
    except KeyboardInterrupt:
        print(f"psservice: interrupted; {_SEE_STATUS}", file=sys.stderr)
        return EXIT_INTERRUPTED


def _drop_output() -> None:
    """Discard the output that is not written yet, or else the interpreter complains at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _operate(options: argparse.Namespace, wrong: Callable[[str], object]) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines on stderr; the error that follows says the same

    from pscore.config import unknown_variables
    from pscore.net.addresses import AddressError  # late: the parser answers --help without loading gRPC
    from pscore.net.channels import ChannelError, Security
    from pscore.net.discovery import DiscoveryError, find
    from psservice.operator import commands, drain, render, top
    from psservice.operator.client import OperateError, ShardClients

    mistyped = [
        *unknown_variables("PSCLIENT_TLS_", ("ca", "cert", "key", "server_name")),
        *unknown_variables("PSCLIENT_TOKEN", ("", "_file")),
    ]
    if mistyped:
        render.say("\n".join(mistyped), failed=True)
        return EXIT_USAGE
    security = Security(
        options.tls_ca,
        options.tls_cert,
        options.tls_key,
        options.tls_server_name,
        os.environ.get("PSCLIENT_TOKEN", ""),
        options.token_file,
    )
    run = {
        "status": commands.status,
        "top": top.top,
        "workers": commands.workers,
        "finish": commands.finish,
        "snapshot": commands.snapshot,
        "checkpoints": commands.checkpoints,
        "restore": commands.restore,
        "drain": drain.drain,
        "evict": commands.evict,
    }
    try:
        addresses, security = find(",".join(options.addresses), security, options.timeout)
        with ShardClients(addresses, options.timeout, security) as clients:
            return run[options.command](clients, options)
    except AddressError as error:
        wrong(str(error))
    except DiscoveryError as error:
        render.say(f"{error}; name the shards one by one to ask those that are there", failed=True)
        return EXIT_UNABLE
    except (commands.MixedShardsError, ChannelError, OperateError) as error:  # the last two: TLS or token files
        render.say(str(error), failed=True)
    return EXIT_USAGE


def _health(options: argparse.Namespace) -> int:
    """Ask a server's plaintext health port, as a container's health check does."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    address, states = options.address, health_pb2.HealthCheckResponse
    # Without the proxy of the environment, through which gRPC would go to loopback too.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]  # made at run time
                health_pb2.HealthCheckRequest(), timeout=options.timeout
            )
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}; is a server running with --health-listen {address}?"
            return _failed("health", f"{address}: {why}")
    if answer.status != states.SERVING:
        state = states.ServingStatus.Name(answer.status)
        why = "the server is starting, drained or stopping, or cannot write its journal: see its log"
        return _failed("health", f"{address}: {state}; {why}")
    print(f"{address}: serving")
    return EXIT_DONE


def _replay(options: argparse.Namespace) -> int:
    from psservice.recovery.past_model import write_model
    from psservice.storage.files import StorageError

    try:
        write_model(options.directory, options.out, version=options.to, checkpoint=options.checkpoint)
    except StorageError as error:
        return _failed("replay", error)
    return EXIT_DONE


def _serve(arguments: Sequence[str]) -> int:
    # Until Server.run handles them: the first process of a container ignores a signal without a handler, and would be
    # killed at the end of its grace period.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(EXIT_DONE))
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines on stderr; ours say the same with advice

    if sys.stderr and sys.stderr.isatty():
        print("psservice: loading PyTorch", file=sys.stderr)  # seconds, in which nothing else can be said

    from psservice import settings
    from psservice.observability import logging  # late: see above

    try:
        loaded = settings.load(arguments)
    except settings.SettingsError as error:
        return _failed("serve", error, EXIT_USAGE)
    logging.configure(loaded.log_level, loaded.log_format)

    import psservice.app.server  # noqa: F401 - now, for the shards that are forked to share
    from psservice.app.shard_processes import ShardProcesses

    # The interpreter's last collection would go through all of torch: half a second of each restart. Modules that are
    # imported later must be collected: torch's optimizers import Triton, whose bindings print what is left at exit.
    gc.freeze()
    return ShardProcesses(loaded, _serve_shard).run() if loaded.shards > 1 else _serve_shard(loaded)


def _serve_shard(settings: "ServerSettings", health: "SharedHealth | None" = None) -> int:
    """Serve one shard in this process; with ``health``, one of several that one command serves."""
    from pscore.model.modelfile import ModelFileError
    from psservice.app.server import Server, ShardFailedError, StartError
    from psservice.observability import logging

    if settings.num_shards > 1:
        logging.configure(settings.log_level, settings.log_format, settings.shard_index)
    command = f"serve: shard {settings.shard_index}" if health else "serve"
    try:
        Server(settings, health).run()
    except (StartError, ModelFileError) as error:
        return _failed(command, error)
    except ShardFailedError as error:
        return _failed(command, error, EXIT_FAILED)
    return EXIT_DONE


def _failed(command: str, error: Exception | str, status: int = EXIT_UNABLE) -> int:
    print(f"psservice {command}: {escaped(str(error))}", file=sys.stderr)
    return status

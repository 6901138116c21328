"""``psservice``: serve, health, status, finish, snapshot, restore, replay."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pscore.version import __version__

EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 server unreachable or unable to start, 2 wrong usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["serve"]:
        return _serve(words[1:])
    parser = argparse.ArgumentParser(prog="psservice", description="A sparse parameter server for PyTorch.")
    parser.add_argument("--version", action="version", version=f"psservice {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", help="run a server (see psservice serve --help)")
    health = commands.add_parser("health", help="ask a server's health port; exit status 0 if it serves, 1 if not")
    health.add_argument("address", nargs="?", metavar="ADDRESS", help="its --health-listen (default 127.0.0.1:50052)")
    health.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for an answer (default 5)")
    status = commands.add_parser("status", help="show versions, workers and bytes of running servers")
    finish = commands.add_parser("finish", help="end the run: pushes are refused, the final model is written")
    snapshot = commands.add_parser("snapshot", help="take a checkpoint over all shards now (shard 0 first)")
    restore = commands.add_parser("restore", help="take running servers back to a version or a checkpoint")
    for command in (status, finish, snapshot, restore):
        command.add_argument("addresses", nargs="+", metavar="ADDRESS", help="HOST:PORT of each shard")
        command.add_argument("--json", action="store_true", help="print JSON")
        _add_security(command)
        seconds = 10.0 if command in (status, finish) else 300.0
        command.add_argument(
            "--timeout",
            type=float,
            default=seconds,
            metavar="SECONDS",
            help=f"deadline of each call (default {seconds:g})",
        )
    target = restore.add_mutually_exclusive_group(required=True)
    target.add_argument("--version", type=int, metavar="V", help="version of each shard to go back to")
    target.add_argument("--checkpoint", default="", metavar="ID", help="checkpoint to go back to")
    replay = commands.add_parser("replay", help="write the model at any version that a data directory covers")
    replay.add_argument(
        "directory", type=Path, metavar="DIR", help="the servers' --data-dir, with every shard's folder"
    )
    target = replay.add_mutually_exclusive_group()
    target.add_argument("--to", type=int, metavar="VERSION", help="version of each shard (default: the last)")
    target.add_argument("--checkpoint", default="", metavar="ID", help="checkpoint instead of a version")
    replay.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    options = parser.parse_args(words)
    if options.command == "health":
        return _health(options)
    return _replay(options) if options.command == "replay" else _operate(options)


def _add_security(command: argparse.ArgumentParser) -> None:
    """Add how a server is reached that asks for TLS or a token; the environment is that of the workers."""
    for name, what, metavar in (
        ("tls-ca", "CA certificates (PEM) of the server; turns on TLS", "FILE"),
        ("tls-cert", "own certificate (PEM), for mutual TLS", "FILE"),
        ("tls-key", "its key (PEM)", "FILE"),
        ("token-file", "file that holds a bearer token; or PSCLIENT_TOKEN", "FILE"),
        ("tls-server-name", "name in the server's certificate, where the address has another", "NAME"),
    ):
        variable = f"PSCLIENT_{name.upper().replace('-', '_')}"
        found = os.environ.get(variable) or None
        kind = Path if metavar == "FILE" else str
        default = kind(found) if found else ("" if kind is str else None)
        command.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{what} ({variable})")


def _operate(options: argparse.Namespace) -> int:
    from pscore.channels import Security  # late: the parser answers --help without loading gRPC
    from psservice import operate

    security = Security(
        options.tls_ca,
        options.tls_cert,
        options.tls_key,
        options.tls_server_name,
        os.environ.get("PSCLIENT_TOKEN", ""),
        options.token_file,
    )
    try:
        if options.command == "restore":
            operate.restore(
                options.addresses,
                options.timeout,
                security,
                as_json=options.json,
                version=options.version,
                checkpoint=options.checkpoint,
            )
        else:
            commands = {"status": operate.status, "finish": operate.finish, "snapshot": operate.snapshot}
            commands[options.command](options.addresses, options.timeout, security, as_json=options.json)
    except operate.OperateError as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        print(f"psservice: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    return EXIT_OK


def _health(options: argparse.Namespace) -> int:
    from psservice import healthcheck

    address = options.address or healthcheck.DEFAULT_ADDRESS
    try:
        healthcheck.check(address, options.timeout)
    except healthcheck.UnhealthyError as error:
        print(f"psservice health: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    print(f"{address}: serving")
    return EXIT_OK


def _replay(options: argparse.Namespace) -> int:
    from psservice import replay
    from psservice.durability.files import StorageError

    try:
        replay.replay(options.directory, options.out, version=options.to, checkpoint=options.checkpoint)
    except StorageError as error:
        print(f"psservice replay: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    return EXIT_OK


def _serve(arguments: Sequence[str]) -> int:
    # Until Server.run heeds it. The first process of a container ignores a signal without a handler, and would only be
    # killed when its grace period is over. Nothing is served yet, and files may be left as kill -9 leaves them.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(EXIT_OK))
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines on stderr; ours say the same with advice

    from psservice import logs, settings  # late: see above

    try:
        loaded = settings.load(arguments)
    except settings.SettingsError as error:
        print(f"psservice serve: {error}", file=sys.stderr)
        return EXIT_USAGE
    logs.configure(loaded.log_level, loaded.log_format)

    from pscore.modelfile import ModelFileError
    from psservice.server import Server, StartError

    try:
        Server(loaded).run()
    except (StartError, ModelFileError) as error:
        print(f"psservice serve: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    return EXIT_OK

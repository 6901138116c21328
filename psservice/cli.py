"""``psservice``: serve, status, finish."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

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
    status = commands.add_parser("status", help="show versions, workers and bytes of running servers")
    finish = commands.add_parser("finish", help="end the run: pushes are refused, the final model is written")
    for command in (status, finish):
        command.add_argument("addresses", nargs="+", metavar="ADDRESS", help="HOST:PORT of each shard")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="deadline of each call")
    options = parser.parse_args(words)

    from psservice import operate  # late: the parser answers --help without loading gRPC

    try:
        report = operate.status if options.command == "status" else operate.finish
        report(options.addresses, options.timeout, as_json=options.json)
    except operate.OperateError as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        print(f"psservice: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    return EXIT_OK


def _serve(arguments: Sequence[str]) -> int:
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

"""``psservice``: one command, and its exit status. torch and gRPC are loaded once a command needs them."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pscore.net.flags import ENDPOINTS, SERVER, named_addresses
from pscore.streams import open_missing_streams
from psservice.cli.parser import command_parser
from psservice.cli.serve import EXIT_DONE, EXIT_UNABLE, EXIT_USAGE, failed, relay, serve, standby

if TYPE_CHECKING:
    from psservice.ctl.client import ShardClients

EXIT_INTERRUPTED, EXIT_NO_READER = 128 + signal.SIGINT, 128 + 13  # as shells have it; not every system has SIGPIPE
EXIT_NOT_WRITTEN = 74  # EX_IOERR of sysexits.h

_SEE_STATUS = "psservice status shows what was done"
_SERVER_MODULES = ("cryptography", "grpc_health", "grpc_reflection", "prometheus_client", "pythonjsonlogger")
"""Those of the extra ``[server]``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 unreachable or unable, 2 usage, 3 refused, 4 in part."""
    open_missing_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["serve"]:
            return serve(words[1:])
        if words[:1] == ["relay"]:
            return relay(words[1:])
        if words[:1] == ["standby"]:
            return standby(words[1:])
        parser = command_parser()
        options = parser.parse_args(words)
        if options.command == "replay":
            return _replay(options)
        if options.command == "health":
            return _health(options)
        if options.command == "compile":
            return _compile()
        if options.command == "completion":
            return _for_a_reader(lambda: _completion(options.shell))
        if options.command == "checkpoint":
            return _for_a_reader(lambda: _checkpoint(options, parser.error))
        return _for_a_reader(lambda: _operate(options, parser.error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _SERVER_MODULES:
            raise
        print(f"psservice: {error.name} is not installed; run: pip install 'sparseps[server]'", file=sys.stderr)
        return EXIT_USAGE


def _for_a_reader(command: Callable[[], int]) -> int:
    """Run a command that prints, and report what its terminal, pipe or file does not take by the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a dash shows a question mark
    try:
        status = command()
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


def _checkpoint(options: argparse.Namespace, wrong: Callable[[str], object]) -> int:
    from psservice.backups.manifest import BackupError
    from psservice.ctl import backups, checkpoints, render
    from psservice.ctl.client import EXIT_REFUSED

    asks_store = getattr(options, "store", None) is not None and options.act not in ("export", "import")
    if asks_store and options.addresses:
        wrong(f"checkpoint {options.act} asks the store of --from or the shards at addresses; give one of them")
    if options.act in ("list", "show", "delete") and not asks_store:
        options.addresses = named_addresses(options.addresses, ENDPOINTS, SERVER)
        if not options.addresses:
            wrong("the following arguments are required: ADDRESS, or --from")
    try:
        if options.act == "import":
            return backups.import_stored(options)
        if asks_store:
            stored = {"list": backups.list_stored, "show": backups.show_stored, "delete": backups.delete_stored}
            return stored[options.act](options)
        if options.act == "show" and options.verify:
            return _operate(options, wrong, backups.show_verified)
        kept = {
            "create": checkpoints.create,
            "list": checkpoints.list_kept,
            "show": checkpoints.show,
            "pin": checkpoints.pin,
            "delete": checkpoints.delete,
            "export": backups.export,
        }
        return _operate(options, wrong, kept[options.act])
    except BackupError as error:
        render.say(str(error), failed=True)
        return EXIT_REFUSED


def _operate(
    options: argparse.Namespace, wrong: Callable[[str], object], run: "Callable[[ShardClients, Any], int] | None" = None
) -> int:
    from pscore.config import unknown_variables
    from pscore.net.addresses import AddressError
    from pscore.net.channels import ChannelError, Security
    from pscore.net.discovery import DiscoveryError, find
    from psservice.ctl import commands, drain, promote, render, top
    from psservice.ctl.client import OperateError, ShardClients

    mistyped = [
        *unknown_variables("PSCLIENT_TLS_", ("ca", "cert", "key", "server_name")),
        *unknown_variables("PSCLIENT_TOKEN", ("", "_file")),
        *unknown_variables("PSSERVICE_ENDP", ("oints",)),
    ]
    if mistyped:
        render.say("\n".join(mistyped), failed=True)
        return EXIT_USAGE
    tls = options.tls_ca, options.tls_cert, options.tls_key, options.tls_server_name
    security = Security(*tls, os.environ.get("PSCLIENT_TOKEN", ""), options.token_file)
    others = {"top": top.top, "drain": drain.drain, "promote": promote.promote}
    run = run or others.get(options.command) or getattr(commands, options.command)
    try:
        addresses, security = find(",".join(options.addresses), security, options.timeout)
        with ShardClients(addresses, options.timeout, security) as clients:
            return run(clients, options)
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

    from pscore.net.proxies import NO_PROXY

    address, states = options.address, health_pb2.HealthCheckResponse
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]  # made at run time
                health_pb2.HealthCheckRequest(), timeout=options.timeout
            )
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}; is a server running with --health-listen {address}?"
            return failed("health", f"{address}: {why}")
    if answer.status != states.SERVING:
        state = states.ServingStatus.Name(answer.status)
        why = "the server is starting, drained or stopping, or cannot write its journal: see its log"
        return failed("health", f"{address}: {state}; {why}")
    print(f"{address}: serving")
    return EXIT_DONE


def _replay(options: argparse.Namespace) -> int:
    from pscore.model.modelfile import ModelFileError
    from psservice.durability.earlier_models import write_model
    from psservice.storage.files import StorageError

    try:
        write_model(options.directory, options.out, version=options.to, checkpoint=options.checkpoint)
    except (StorageError, ModelFileError) as error:
        return failed("replay", error)
    return EXIT_DONE


def _completion(shell: str) -> int:
    from pscore.completion import completion_script
    from psservice.settings import flag_parser

    print(completion_script(command_parser(flag_parser), shell))
    return EXIT_DONE


def _compile() -> int:
    from psservice.warmup import warm_up

    warm_up()
    return EXIT_DONE

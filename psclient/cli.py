"""``psclient``: save a server's model, follow it, join the parts of a sharded one, compile the loops of a worker."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pscore.completion import add_completion, completion_script
from pscore.net.flags import SERVER, add_addresses, add_security
from pscore.streams import open_missing_streams
from pscore.units import positive_seconds
from pscore.version import __version__

_ORDER_SECONDS = 5.0  # for a shard to tell which one it is
_SECURITY = ("tls_ca", "tls_cert", "tls_key", "token_file", "tls_server_name")


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="psclient", description="The worker's side of a sparse parameter server.")
    parser.add_argument("--version", action="version", version=f"psclient {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    save = commands.add_parser(
        "save",
        help="write a running server's model to a safetensors file",
    )
    add_addresses(save, "HOST:PORT of each shard, in any order; or dns:///HOST:PORT", SERVER)
    save.add_argument("--out", type=Path, required=True, metavar="FILE")
    save.add_argument("--timeout", type=positive_seconds, default=30.0, metavar="SECONDS", help="how long to try")
    follow = commands.add_parser(
        "follow",
        help="keep a directory at the newest version of a running training",
    )
    add_addresses(follow, "HOST:PORT of each shard, in any order; or dns:///HOST:PORT", SERVER)
    follow.add_argument("--out", required=True, metavar="DIR", help="for safetensors files and their index")
    follow.add_argument(
        "--exec",
        default="",
        metavar="COMMAND",
        help="a program with its arguments, without a shell, that is run after each version; SPARSEPS_VERSION, "
        "SPARSEPS_DIRECTORY and others are set",
    )
    follow.add_argument(
        "--dtype",
        choices=("run", "float16", "bfloat16"),
        default="run",
        help="in which the files have the run's float32 parameters (default: as the run); 16 bits need fewer bytes: "
        "only what differs once it is rounded is fetched",
    )
    follow.add_argument("--once", action="store_true", help="end when a version is there")
    follow.add_argument(
        "--timeout",
        type=positive_seconds,
        default=30.0,
        metavar="SECONDS",
        help="with --once: how long to wait for a version (default: %(default)s)",
    )
    follow.add_argument(
        "--allow-older", action="store_true", help="follow a run that goes back to an older version, too"
    )
    for each in (save, follow):
        add_security(each)
    merge = commands.add_parser("merge", help="join the final models of all shards into one file")
    merge.add_argument("parts", nargs="+", type=Path, metavar="PART")
    merge.add_argument("--out", type=Path, required=True, metavar="FILE")
    add_completion(commands)
    commands.add_parser("compile", help="compile a worker's loops for this machine now, so that no first step waits")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong usage."""
    open_missing_streams()
    parser = command_parser()
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)

    if options.command == "compile":
        return _compile()
    if options.command == "completion":
        print(completion_script(parser, options.shell))
        return 0

    from psclient import settings
    from psclient.errors import SparsepsError
    from psclient.rpc import download  # late: the parser answers --help without loading torch
    from pscore.model import modelfile
    from pscore.names import escaped
    from pscore.net.addresses import AddressError, expand
    from pscore.net.discovery import in_order

    try:
        if options.command == "merge":
            modelfile.check_path(options.out)
            modelfile.write(options.out, modelfile.read_parts(options.parts), {"format": "pt"})
            print(f"wrote {options.out}")
            return 0
        loaded = settings.load(**{name: getattr(options, name) or None for name in _SECURITY})
        addresses = expand(",".join(options.addresses))
        if len(addresses) > 1:
            addresses = tuple(in_order(addresses, loaded.security, _ORDER_SECONDS))
        if options.command == "follow":
            from psclient.reader import command

            return command.run(
                ",".join(addresses),
                loaded,
                options.out,
                options.exec,
                dtype=options.dtype,
                once=options.once,
                seconds=options.timeout,
                allow_older=options.allow_older,
            )
        download.save(addresses, options.out, loaded, patience_seconds=options.timeout)
    except (SparsepsError, AddressError, modelfile.ModelFileError, OSError) as error:
        print(f"psclient: {escaped(str(error))}", file=sys.stderr)
        return 1
    print(f"wrote {options.out}")
    return 0


def _compile() -> int:
    from psclient.model import replica_loops
    from pscore.model import digest_loops
    from pscore.warmup import warm_up, warm_up_selection

    for compile_some in (warm_up, warm_up_selection, replica_loops.warm_up, digest_loops.warm_up):
        compile_some()
    return 0

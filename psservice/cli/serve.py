"""``psservice serve``: a server of one shard, or of all shards of a host."""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pscore.names import escaped

if TYPE_CHECKING:
    from psservice.process.shared_health import SharedHealth
    from psservice.settings import ServerSettings

EXIT_DONE, EXIT_UNABLE, EXIT_USAGE = 0, 1, 2
CHECK_CONFIG = "--check-config"
EXIT_FAILED = 70  # EX_SOFTWARE of sysexits.h


def relay(arguments: Sequence[str]) -> int:
    """Relay another server until told to stop, with the flags of ``serve`` and ``--of``; return the exit status."""
    return serve(arguments, command="relay")


def standby(arguments: Sequence[str]) -> int:
    """Stand by for another server, with the flags of ``serve`` and ``--of``; serve once promoted."""
    return serve(arguments, command="standby")


def serve(arguments: Sequence[str], command: str = "serve") -> int:
    """Serve until told to stop, with these flags; return the exit status."""
    # Until a SignalThread hears them: the first process of a container ignores a signal without a handler, and would be
    # killed at the end of its grace period.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: _end_a_start(signal.Signals(number)))

    if sys.stderr and sys.stderr.isatty():
        print("psservice: loading PyTorch", file=sys.stderr)  # seconds, in which nothing else can be said

    from psservice import settings
    from psservice.observability import log_lines  # late: see above

    is_check = CHECK_CONFIG in arguments
    try:
        loaded = settings.load([each for each in arguments if each != CHECK_CONFIG], command)
    except settings.SettingsError as error:
        return failed(command, error, EXIT_USAGE)
    if command == "relay" and not loaded.relay_of:
        return failed(command, "name the server that is relayed: psservice relay --of HOST:PORT", EXIT_USAGE)
    if command == "standby" and not loaded.standby_of:
        return failed(command, "name the server to stand by for: psservice standby --of HOST:PORT", EXIT_USAGE)
    if is_check:
        return _check(loaded)
    try:
        log_lines.configure(loaded.log_level, loaded.log_format, audit_log=loaded.audit_log)
    except OSError as error:
        return failed(command, f"--audit-log {loaded.audit_log} cannot be opened: {error.strerror}")

    import psservice.process.server
    import psservice.process.standby_server  # noqa: F401 - now, for the shards that are forked to share
    from psservice.process.shard_processes import ShardProcesses
    from psservice.relay.shard_count import with_shards

    loaded = with_shards(loaded)
    # The interpreter's last collection would go through all of torch: half a second of each restart. Modules that are
    # imported later must be collected: torch's optimizers import Triton, whose bindings print what is left at exit.
    gc.freeze()
    return ShardProcesses(loaded, _serve_shard).run() if loaded.shards > 1 else _serve_shard(loaded)


def _check(settings: "ServerSettings") -> int:
    """Print what a start with these settings would find; return 0 if the server would start, and 1 if not."""
    from psservice.observability import log_lines
    from psservice.process.check_config import check

    log_lines.configure("error", settings.log_format)
    findings = []
    for finding in check(settings):
        print(escaped(str(finding)))
        findings.append(finding)
    faults = sum(finding.is_fault for finding in findings)
    print(f"the server would not start: {faults} fault{'s' * (faults > 1)}" if faults else "the server would start")
    return EXIT_UNABLE if faults else EXIT_DONE


def _serve_shard(settings: "ServerSettings", health: "SharedHealth | None" = None) -> int:
    """Serve one shard in this process; with ``health``, one of several that one command serves."""
    from pscore.model.modelfile import ModelFileError
    from psservice.observability import log_lines
    from psservice.process.server import Server, ShardFailedError, StartError
    from psservice.process.signals import SignalThread
    from psservice.process.standby_server import End, StandbyServer
    from psservice.storage.environment import MACHINE
    from psservice.storage.replica import was_promoted

    signals = SignalThread(_end_a_start)
    if settings.num_shards > 1:
        log_lines.configure(settings.log_level, settings.log_format, settings.shard_index, settings.audit_log)
    command = f"serve: shard {settings.shard_index}" if health else "serve"
    try:
        with log_lines.in_thread():
            if (
                settings.standby_of
                and not (health and health.is_promoted)
                and not was_promoted(settings, MACHINE.files)
            ):
                waiting = StandbyServer(settings, health)
                if waiting.run(signals) is End.STOPPED:
                    return EXIT_DONE
                settings = waiting.settings.model_copy(update={"ready_fd": None})
                signals.hear = _end_a_start
            Server(settings, health).run(signals)
    except (StartError, ModelFileError) as error:
        return failed(command, error)
    except ShardFailedError as error:
        return failed(command, error, EXIT_FAILED)
    return EXIT_DONE


def _end_a_start(number: signal.Signals) -> None:
    """End this process, whose server has not started; what that has done by then is as after a crash."""
    if number is not signal.SIGHUP:  # of a terminal that is closed
        os._exit(EXIT_DONE)


def failed(command: str, error: Exception | str, status: int = EXIT_UNABLE) -> int:
    """Print an error of a command, and return the exit status."""
    print(f"psservice {command}: {escaped(str(error))}", file=sys.stderr)
    return status

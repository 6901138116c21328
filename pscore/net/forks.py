"""gRPC and forked processes: a child that never uses gRPC is safe, and one that would use it is refused at once.

gRPC's threads do not exist in a forked child, so a call there would wait for ever; also after the parent has closed
its channels, because gRPC ends its threads some time later. gRPC's own handlers for forks are no help: they abort
children that never use it. So ``pscore`` turns them off before gRPC is loaded.
"""

import logging
import os
import threading

import pscore

log = logging.getLogger(__name__)

REFUSED = (
    "this process was forked from one that has talked to a server, and gRPC does not work in such a child; start the "
    'process with the method "spawn" or "forkserver" (multiprocessing.get_context("spawn"), or '
    'multiprocessing_context="forkserver" of a DataLoader), and make an optimizer of its own there'
)

_WARNING = (
    "gRPC was loaded with its handlers for forks, which now and then abort a forked process (a worker of a "
    "DataLoader, multiprocessing, subprocess with preexec_fn): set GRPC_ENABLE_FORK_SUPPORT=0 in the environment, or "
    "load psclient before grpc"
)

_lock = threading.Lock()
_user = 0  # the process that has opened a channel, and of which forked children may not; 0 for none


def note_channel() -> None:
    """Note that this process uses gRPC from now on; see :func:`is_child_of_user`."""
    global _user
    with _lock:
        if _user:
            return
        _user = os.getpid()
    if pscore.grpc_handles_forks:
        os.register_at_fork(before=_warn_once)


def is_child_of_user() -> bool:
    """Tell whether this process was forked, itself or an ancestor, from one that has opened a channel."""
    return _user not in (0, os.getpid())


def _warn_once() -> None:
    if pscore.grpc_handles_forks:
        pscore.grpc_handles_forks = False
        log.warning(_WARNING)

"""Versions of the protocol: those that this release speaks, and the one that it shares with a peer.

A version changes only if a peer that does not know of the change would do something wrong; docs/reference/protocol.md,
*Versions*, says what may change without that.
"""

from pscore.wire.errors import ErrorCode, Rejected

OLDEST_PROTOCOL, NEWEST_PROTOCOL = 3, 3


def common_protocol(oldest: int, newest: int) -> int:
    """Return the newest version that this release shares with a worker that speaks ``oldest`` to ``newest``.

    ``newest`` is 0 if the worker names one version alone, as releases did that could not negotiate.

    Raises:
        Rejected: ``UNKNOWN_PROTOCOL`` if there is none, ``BAD_REQUEST`` if the worker's range is empty.
    """
    if newest and newest < oldest:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a worker speaks protocols {oldest} to {newest}, which is none")
    newest = newest or oldest
    shared = min(newest, NEWEST_PROTOCOL)
    if shared < max(oldest, OLDEST_PROTOCOL):
        older = "worker" if newest < OLDEST_PROTOCOL else "server"
        raise Rejected(
            ErrorCode.UNKNOWN_PROTOCOL,
            f"the worker speaks protocol {_shown(oldest, newest)}, the server "
            f"{_shown(OLDEST_PROTOCOL, NEWEST_PROTOCOL)}: the {older} is of the older release",
        )
    return shared


def _shown(oldest: int, newest: int) -> str:
    return str(oldest) if oldest == newest else f"{oldest} to {newest}"

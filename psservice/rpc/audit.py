"""The audit trail: a line for each call of an operator that changes something, and for each call that is refused.

The lines go to the logger ``psservice.audit``; a thread writes them, to the server's log and to ``--audit-log``.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from pscore.names import escaped
from pscore.wire.errors import Rejected
from psservice.rpc.auth import Authenticator, Credentials
from psservice.rpc.caller import Caller
from psservice.rpc.calls import RULES, Call

audit = logging.getLogger("psservice.audit")
refusals = audit.getChild("refused")

_FREE_LINES = 100  # of refused calls that come at once
_LINES_A_SECOND = 1.0  # beyond those: 40 MB a day, whatever is refused
_LONGEST_DETAIL = 2000


class AuditTrail:
    """Writes who has made a call, and how it ended. Not thread-safe. ``clock`` returns monotonic seconds.

    Of refused calls a hundred at once have a line, and then one a second; the next line has the number of those left
    out, as ``left_out``. What an operator has done always has a line.
    """

    def __init__(self, authenticator: Authenticator, clock: Callable[[], float] = time.monotonic) -> None:
        self._authenticator, self._clock = authenticator, clock
        self._room, self._seen, self._left_out = float(_FREE_LINES), clock(), 0

    def operators_call(self, call: Call, context: Any, refusal: BaseException | None) -> None:
        """Write that an audited call has ended, with ``refusal`` if it was refused or failed."""
        extra = {"rpc": call.rpc, **(call.audit or {}), "peer": context.peer(), **_who(call.caller, context)}
        if refusal is None:
            audit.info("an operator's call", extra={**extra, "outcome": "OK"})
            return
        if (left_out := self._left_out_before()) is not None:
            detail = {"detail": _cut(refusal.detail)} if isinstance(refusal, Rejected) else {}
            outcome = refusal.reason.name if isinstance(refusal, Rejected) else type(refusal).__name__
            audit.info("an operator's call", extra={**extra, "outcome": outcome, **detail, **left_out})

    def refused(self, rpc: str, context: Any, credentials: Credentials | None, refusal: Rejected) -> None:
        """Write that a call was refused; at level debug if its caller only comes back after a moment."""
        shown = {} if credentials is None else self._shown(rpc, credentials, context)
        reason = {"reason": refusal.reason.name, "detail": _cut(refusal.detail)}
        extra = {"rpc": rpc, "peer": context.peer(), **shown, **reason}
        if refusal.retry_seconds is not None:
            refusals.debug("refused", extra=extra)
        elif (left_out := self._left_out_before()) is not None:
            refusals.info("refused", extra={**extra, **left_out})

    def _shown(self, rpc: str, credentials: Credentials, context: Any) -> dict[str, str]:
        """Return who calls, or by what names somebody does who is not known."""
        rule = RULES.get(rpc)
        caller = None if rule is None else self._authenticator.caller(credentials, rule.role)
        return self._authenticator.shown_names(credentials) if caller is None else _who(caller, context)

    def _left_out_before(self) -> dict[str, int] | None:
        """Return how many calls have no line since the last one, or ``None`` if there is no room for another line."""
        now = self._clock()
        self._room = min(_FREE_LINES, self._room + (now - self._seen) * _LINES_A_SECOND)
        self._seen = now
        if self._room < 1.0:
            self._left_out += 1
            return None
        self._room -= 1.0
        left_out, self._left_out = self._left_out, 0
        return {"left_out": left_out} if left_out else {}


def _cut(detail: str) -> str:
    return detail if len(detail) <= _LONGEST_DETAIL else f"{detail[:_LONGEST_DETAIL]}…"


def _who(caller: Caller, context: Any) -> dict[str, str]:
    """Return the role of a caller, and what shows it; of a certificate without a role, the common name."""
    who = {"role": caller.role.name.lower()}
    if caller.token:
        who["token"] = caller.token
    if caller.certificate:
        who["certificate"] = caller.certificate
    elif names := context.auth_context().get("x509_common_name"):
        who["certificate"] = escaped(names[0].decode("utf-8", "replace"))
    return who

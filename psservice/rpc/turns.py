"""Turns at the event loop, for calls of which there may be many and which nobody waits for."""

import asyncio
from collections import deque


class Turns:
    """Lets a few waiting coroutines go on in each round of the loop; what comes meanwhile is served between.

    All coroutines run on one event loop.

    Args:
        each_round: how many go on in one round.
    """

    def __init__(self, each_round: int) -> None:
        self._each_round = each_round
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def take(self) -> None:
        """Wait for a turn, behind those that wait already."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._grant, loop)
        await turn

    def _grant(self, loop: asyncio.AbstractEventLoop) -> None:
        left = self._each_round
        while self._waiting and left:
            turn = self._waiting.popleft()
            if not turn.done():  # else its call has ended
                turn.set_result(None)
                left -= 1
        self._is_due = bool(self._waiting)
        if self._is_due:
            loop.call_soon(self._grant, loop)

"""A worker that is interrupted at random moments and goes on each time, as a notebook's user does; prints its counts.

``python -m tests.system.interrupted SERVER INTERRUPTS SEED OVERLAP``
"""

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from types import FrameType

import torch

import psclient

_MOST_SECONDS_APART = 0.03
_STUCK_SECONDS = 100


class Interrupter:
    """Raises KeyboardInterrupt in the main thread at random moments, as often as asked, one for each :meth:`arm`."""

    def __init__(self, interrupts: int, seed: int) -> None:
        """Begin."""
        self.left = interrupts
        self._armed = False
        self._draws = random.Random(seed)
        signal.signal(signal.SIGINT, self._raise)
        threading.Thread(target=self._send, daemon=True).start()

    def arm(self) -> None:
        """Let the next signal raise."""
        self._armed = True

    def disarm(self) -> None:
        """Let none raise."""
        self._armed = False

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            self.left -= 1
            raise KeyboardInterrupt

    def _send(self) -> None:
        while self.left > 0:
            time.sleep(self._draws.uniform(0, _MOST_SECONDS_APART))
            os.kill(os.getpid(), signal.SIGINT)


def main(server: str, interrupts: int, seed: int, overlap: bool) -> None:
    """Train through the interrupts, then print what was begun and what ended."""
    layer = torch.nn.Linear(50, 1, bias=False)
    counts = {"begun": 0, "ended": 0, "optimizers": 0}
    optimizer: psclient.ASGD | None = None

    def train() -> None:
        nonlocal optimizer
        if optimizer is None:
            made = psclient.ASGD(layer.parameters(), lr=1.0, model=layer, server=server, worker="w", overlap=overlap)
            optimizer = made
            counts["optimizers"] += 1
        for step in range(20):
            optimizer.zero_grad()
            counts["begun"] += 1
            layer(torch.ones(1, 50)).sum().backward()
            optimizer.step()
            counts["ended"] += 1
            if step % 5 == 0:
                optimizer.pull()
        leaving, optimizer = optimizer, None
        leaving.close()

    train()  # all is imported then: an import that is interrupted is not ours to mend
    interrupter = Interrupter(interrupts, seed)
    while interrupter.left > 0:
        faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True)
        try:
            interrupter.arm()
            train()
        except KeyboardInterrupt:
            continue
        finally:
            interrupter.disarm()
    for _ in range(2):
        train()
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "overlap")

"""A worker with the real client: a small model and DGS, trained on noise until it is told what to do next.

Run as a process, ``python -m verify.traffic.trainer``. It prints a line of JSON a step, and takes a word a line:
``flush`` (push what is held, and stop training), ``pull`` (fetch the whole model, and name its bits), ``leave``.
"""

import argparse
import json
import os
import sys
import threading
from typing import Any

import torch
from torch import nn

import psclient
from psclient.errors import HandshakeError
from psclient.settings import ClientSettings
from verify.client.wire import digest

_SETTINGS = ClientSettings.model_validate(
    {"deadline_seconds": 5, "connect_seconds": 120, "patience_seconds": 120, "dense_below": 0}
)
_MOST_PULLS = 300
_FEATURES, _CLASSES, _BATCH = 32, 8, 64


def make_model(hidden: int, seed: int) -> nn.Sequential:
    """Build a model of about ``hidden²`` parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(_FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, _CLASSES)
    )


class _Words:
    """What the standard input says, word by word."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._came = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._say(line.strip())
        self._say("leave")

    def _say(self, word: str) -> None:
        with self._came:
            self._words.append(word)
            self._came.notify_all()

    def heard(self) -> bool:
        with self._came:
            return bool(self._words)

    def next(self) -> str:
        with self._came:
            self._came.wait_for(lambda: self._words)
            return self._words.pop(0)


def _print(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _pull_all(optimizer: psclient.DGS, model: nn.Module) -> str:
    """Pull until a pull changes nothing: a top-k reply holds only a share of what differs; return the model's bits."""
    before = ""
    for _ in range(_MOST_PULLS):
        optimizer.pull()
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        if (now := digest(flat.numpy())) == before:
            break
        before = now
    return before


def main() -> int:
    """Train, then do as told."""
    parser = argparse.ArgumentParser(prog="python -m verify.traffic.trainer")
    parser.add_argument("--server", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True)
    parser.add_argument("--overlap", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    words, parent, between = _Words(), os.getppid(), threading.Event()
    model = make_model(options.hidden, options.seed)

    def join() -> psclient.DGS:
        return psclient.DGS(
            model.parameters(),
            lr=0.05,
            momentum=0.5,
            density=0.02,
            model=model,
            server=options.server,
            worker=options.name,
            overlap=options.overlap,
            settings=_SETTINGS,
        )

    try:
        optimizer = join()
    except HandshakeError:  # the proxy of a server that starts again closes connections, as a TLS port does
        optimizer = join()
    _print(method=optimizer._method.name, settings=optimizer._agreed_settings())
    refused = 0
    while not words.heard() and os.getppid() == parent:
        optimizer.zero_grad()
        x = torch.randn(_BATCH, _FEATURES)
        nn.functional.cross_entropy(model(x), torch.randint(_CLASSES, (_BATCH,))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        refused += optimizer.report.refused
        _print(step=optimizer.report.step, ms=1e3 * optimizer.report.round_trip_seconds)
        between.wait(options.pause)
    while (word := words.next()) != "leave":
        if word == "flush":
            optimizer.flush()
            refused += optimizer.report.refused
            _print(flushed=optimizer.report.step, refused=refused)
        elif word == "pull":
            _print(pulled=optimizer.version, digest=_pull_all(optimizer, model))
    optimizer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

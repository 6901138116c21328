"""An operator that takes named checkpoints, deletes some, and misses those that a power cut has taken."""

import random
import threading
from collections.abc import Callable
from contextlib import closing

import grpc
import numpy as np
from safetensors.numpy import load

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client.wire import Line, digest
from verify.model.timeline import Timeline

_CALL_SECONDS = 20.0
_BETWEEN_SECONDS = 0.05, 0.5
_KEPT = 3
_TENSORS_NAME, _VALUES_NAME = "state.safetensors", "theta"


class CheckpointKeeper:
    """Takes, deletes and reads checkpoints; the calls are made by one thread at a time.

    Args:
        rng: of everything that is drawn.
        timeline: knows the values at each version, and is told of what is lost.
    """

    def __init__(self, rng: random.Random, timeline: Timeline) -> None:
        self._rng, self._timeline = rng, timeline
        self._versions: dict[str, int] = {}
        self._digests: dict[str, str] = {}
        self._number = 0

    def keep(self, address: str, stop: threading.Event, before: Callable[[], None]) -> None:
        """Take checkpoints until told to stop; ``before`` is called before each, with the server's answer pending."""
        with closing(Line(address)) as line:
            while not stop.wait(self._rng.uniform(*_BETWEEN_SECONDS)):
                self._number += 1
                name = f"kept-{self._number}"
                before()
                try:
                    taken = line.stub.TakeSnapshot(pb.TakeSnapshotRequest(checkpoint=name), timeout=_CALL_SECONDS)
                    self._versions[name] = taken.version
                    self._timeline.verdict.checkpoints += 1
                    while len(self._versions) > _KEPT:
                        old = self._rng.choice([*self._versions])
                        del self._versions[old]  # from now on it may be there or not
                        line.stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(checkpoint=old), timeout=_CALL_SECONDS)
                except grpc.RpcError:
                    continue  # taken or not, deleted or not

    def check(self, address: str) -> None:
        """Compare the server's checkpoints with those that it was said to have, behind a cut."""
        verdict = self._timeline.verdict
        with closing(Line(address)) as line:
            listed = line.stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=_CALL_SECONDS).checkpoints
            there = {each.checkpoint: each.version for each in listed}
            for name, version in [*self._versions.items()]:
                if there.get(name) == version <= self._timeline.version:
                    values = self._timeline.values_at(version)
                    if values is not None:
                        self._digests.setdefault(name, digest(values))
                    continue
                verdict.checkpoints_lost += 1
                verdict.say(f"checkpoint {name} of version {version} is gone: there are {there}")
                del self._versions[name]
            known = [name for name in self._versions if name in self._digests]
            if known:
                name = self._rng.choice(known)
                verdict.compared += 1
                if digest(self._read(line, name)) != self._digests[name]:
                    verdict.checkpoints_lost += 1
                    verdict.say(f"checkpoint {name} is not the model of version {self._versions[name]}")

    def _read(self, line: Line, name: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        files: dict[str, bytearray] = {}
        current = bytearray()
        for message in line.stub.ReadCheckpoint(pb.ReadCheckpointRequest(checkpoint=name), timeout=_CALL_SECONDS):
            if message.HasField("file"):
                current = files[message.file.name] = bytearray()
            else:
                current += message.data
        values: np.ndarray[tuple[int], np.dtype[np.float32]] = load(bytes(files[_TENSORS_NAME]))[_VALUES_NAME]
        return values

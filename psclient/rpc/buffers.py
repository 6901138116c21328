"""BatchNorm statistics and the like: a worker's part of the run's average."""

import logging
from collections.abc import Sequence

import torch

from psclient.errors import REJOIN_REASONS, from_refusal
from psclient.model.memory import unrepeated
from psclient.rpc.run import Run
from pscore.model.buffers import is_exchanged, pack, packed_bytes, unpack
from pscore.wire import frames
from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")


class BufferExchange:
    """The exchange of buffers with shard 0.

    Attributes:
        tensors: the floating-point ones and integer scalars, which are averaged.
    """

    def __init__(self, run: Run) -> None:
        self.tensors = run.buffers.only(is_exchanged)
        self._run = run
        self._said_nan: set[str] = set()  # names of buffers

    @property
    def travel(self) -> bool:
        """Whether the run averages buffers that this model has."""
        return bool(self.tensors.specs) and self._run.run_settings.buffer_policy != pb.BUFFER_POLICY_NONE

    def exchange(self, step: int, samples: int, *, adopt: bool = False) -> int:
        """Contribute this worker's buffers to the average; return the message bytes moved, 0 if there are none.

        ``samples`` have passed through the model since the last exchange. ``adopt`` writes the average over the buffers
        even if the policy leaves each worker its own. If the lease or the model is lost, nothing is exchanged.
        """
        if not self.travel:
            return 0
        run, shard = self._run, self._run.coordinator
        tensors, specs = self.tensors.now(), self.tensors.specs
        on_host = [tensor.detach().cpu() for tensor in tensors]
        self._warn_of_nan(on_host)
        data = pack(on_host)
        header = pb.BuffersHeader(
            identity=run.identity,
            step=step,
            generation=shard.generation,
            samples=samples,
            buffer_bytes=len(data),
        )
        messages = [pb.ExchangeBuffersRequest(header=header)]
        pieces = frames.encode_bytes(data, run.run_settings.chunk_bytes)
        messages += [pb.ExchangeBuffersRequest(buffers=piece) for piece in pieces]
        moved = sum(frames.wire_bytes(message) for message in messages)

        def attempt(seconds: float) -> bytes:
            nonlocal moved
            reader = frames.BytesReader(packed_bytes(specs), packed_bytes(specs))
            call = shard.connection.stub.ExchangeBuffers(iter(messages), timeout=seconds)
            with shard.connection.tracked(call):
                for response in call:
                    moved += frames.wire_bytes(response)
                    reader.read(response.buffers)
            return reader.finish()

        average = shard.connection.call(run.policy(), attempt)
        if isinstance(average, Rejected):
            if average.reason not in REJOIN_REASONS:
                raise from_refusal(average) from None
        elif adopt or run.run_settings.buffer_policy == pb.BUFFER_POLICY_SYNC:
            for tensor, value in zip(tensors, unpack(average, specs), strict=True):
                once = unrepeated(tensor)
                tensor[once].copy_(value[once])
        return moved

    def _warn_of_nan(self, buffers: Sequence[torch.Tensor]) -> None:
        """Say once of each buffer that it is not a number somewhere."""
        for spec, buffer in zip(self.tensors.specs, buffers, strict=True):
            if spec.name not in self._said_nan and bool(buffer.isnan().any()):
                self._said_nan.add(spec.name)
                log.warning(
                    "buffer %s is not a number somewhere, after a batch with NaN, say: such values do not count in the "
                    "run's average, and training goes on. With --buffers sync, the average takes their place",
                    spec.name,
                )

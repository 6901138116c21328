"""The layouts that joining workers bring: compared with the run's before anything is made of them.

A layout may have tens of thousands of tensors, and a worker may join as often as it likes. Where the run has a model,
a join costs one comparison of bytes, and where they differ one walk to the first difference.
"""

from pscore.model.layout import ModelLayout
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.messages import first_difference, layout_from_message, layout_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cluster.leases import Identity
from psservice.shard.state import ShardState


class JoinLayouts:
    """Reads layouts for one shard; from any thread.

    Args:
        state: the shard.
    """

    def __init__(self, state: ShardState) -> None:
        """Nobody has joined."""
        self._state = state
        self._known: tuple[ModelLayout, pb.ModelLayout, bytes] | None = None

    def read(self, identity: Identity, message: pb.ModelLayout) -> ModelLayout:
        """Return the run's layout where a worker brings the same, else what it brings where that may become the run's.

        Raises:
            Refusal: ``FINGERPRINT_MISMATCH``, naming the first tensor that differs; ``BAD_REQUEST``.
        """
        ours = self._state.layout
        if ours is None:
            return layout_from_message(message)
        known, data = self._message_of(ours)
        if message.SerializeToString(deterministic=True) == data:
            return ours
        if self._state.is_alone(identity):
            return layout_from_message(message)
        if difference := first_difference(known, message):
            name, how = difference
            raise Rejected(ErrorCode.FINGERPRINT_MISMATCH, how, tensor=name)
        if message.fingerprint != known.fingerprint:
            raise Rejected(ErrorCode.BAD_REQUEST, "the layout does not have the fingerprint that it states")
        return ours

    def _message_of(self, layout: ModelLayout) -> tuple[pb.ModelLayout, bytes]:
        """Return the run's layout as a message and its bytes, made once."""
        if self._known is None or self._known[0] is not layout:
            message = layout_to_message(layout)
            self._known = layout, message, message.SerializeToString(deterministic=True)
        return self._known[1:]

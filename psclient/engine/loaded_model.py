"""A model that a script loads into a worker after joining: noticed, and offered to the servers in place of theirs."""

import logging

from psclient.errors import ModelChangedError, ModelLoadedError
from psclient.model.replica import Replica
from psclient.rpc.cluster import Cluster
from psclient.settings import OnLoad
from pscore.names import shown
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")


def written_tensor(cluster: Cluster) -> str | None:
    """Return the name of a parameter that somebody else has written to since the last reply; costs next to nothing.

    Raises:
        ModelChangedError: a parameter, or a buffer that travels, has another dtype, shape or device.
    """
    name = cluster.replica.loaded()
    if cluster.buffers_travel:
        cluster.buffers.now()
    return name


def is_intact(replica: Replica) -> bool:
    """Tell whether a reply can be applied to the replica."""
    try:
        return replica.loaded() is None
    except ModelChangedError:
        return False


def offer_model(cluster: Cluster, tensor: str, digest: bytes, on_load: OnLoad, *, drops: bool = False) -> None:
    """Offer the parameters to the servers in the place of theirs; a pull brings what is left to be brought.

    Args:
        cluster: the servers.
        tensor: one that was written to.
        digest: that of the parameters.
        on_load: see :class:`~psclient.settings.ClientSettings`.
        drops: whether to drop them rather than raise.

    Raises:
        ModelLoadedError: the server's model has been trained, and nobody has said which of the two is to stay.
    """
    membership = cluster.membership
    before = membership.coordinator.generation
    accepted = membership.join(pb.LoadedModel(digest=digest, replaces=on_load == "replace"))
    if not accepted and on_load == "error" and not drops:
        raise ModelLoadedError(tensor, membership.identity.run_id, membership.version)
    if not accepted:
        log.warning(
            "the model that was loaded is dropped, as %s says: run %s goes on from its own, at version %d",
            'on_load="server"' if on_load == "server" else "pull()",
            shown(membership.identity.run_id),
            membership.version,
        )
    cluster.replica.accept()
    if membership.coordinator.generation == before or not all(shard.has_base for shard in cluster.shards):
        for shard in cluster.shards:
            shard.forget_base()

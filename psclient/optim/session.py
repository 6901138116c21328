"""What an optimizer is connected with: built here, before the first contact, which is :meth:`Membership.join`."""

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch

from psclient import settings as client_settings
from psclient.buckets.lags import Lags
from psclient.buckets.planner import BucketPlanner
from psclient.compress.compressor import Choice, Compressor
from psclient.compress.groups import ParamGroups
from psclient.compress.method import Method, State
from psclient.engine.push_pull import PushPull
from psclient.errors import ConfigurationError
from psclient.model.module import TrainedModel
from psclient.model.replica import Replica
from psclient.rpc.cluster import Cluster
from psclient.rpc.membership import Membership
from psclient.rpc.resolver import connect
from psclient.rpc.shard import ShardClient
from psclient.settings import ClientSettings
from pscore import jit
from pscore.select import SELECTORS
from pscore.telemetry import tracing
from pscore.telemetry.span import TracingError

log = logging.getLogger("psclient")


@dataclass(frozen=True)
class Session:
    """One worker's parts, from the servers to the memories.

    Attributes:
        membership: its place in the run.
        cluster: all shards.
        compressor: selects, and takes back what did not arrive.
        push_pull: its pushes and pulls.
        planner: which tensors go together.
        server: how the servers were named.
    """

    membership: Membership
    cluster: Cluster
    compressor: Compressor
    push_pull: PushPull
    planner: BucketPlanner
    server: str


def open_session(
    method: type[Method],
    agreed: Mapping[str, str],
    model: TrainedModel,
    groups: ParamGroups,
    memories: MutableMapping[torch.Tensor, State],
    server: str,
    settings: ClientSettings,
    lags: Lags | None = None,
) -> Session:
    """Put the parts together.

    Args:
        method: the training method.
        agreed: its settings in which all workers must agree.
        model: what is trained.
        groups: with which hyper-parameters.
        memories: each parameter's.
        server: how the servers are named.
        settings: everything about the connection.
        lags: gives each layer a density of its own, where asked for.

    Raises:
        ConfigurationError: a server address is not one, or tracing cannot begin.
        ServerUnreachableError: behind one name for all shards, some were not found.
    """
    jit.announce = log.warning
    worker = client_settings.worker_name(settings)
    if settings.tracing:
        try:
            tracing.start("psclient", worker)
        except TracingError as error:
            raise ConfigurationError(str(error)) from error
    connections = connect(server, settings.security, settings.connect_seconds)
    shards = [ShardClient(connection, index, settings) for index, connection in enumerate(connections)]
    replica = Replica(model.layout, model.parameters)
    membership = Membership(shards, worker, replica, model.buffers, method.name, agreed, settings)
    cluster = Cluster(shards, membership, replica, model.buffers)
    choice = Choice(SELECTORS[settings.selector], settings.select_over, settings.dense_below)
    planner = BucketPlanner(
        model.layout,
        settings.merge,
        group_elements=settings.group_elements,
        bucket_bytes=settings.bucket_bytes,
        dense_below=settings.dense_below,
        lags=lags,
    )
    compressor = Compressor(method, model, memories, groups.of, choice, planner.density_of)
    push_pull = PushPull(model.layout, cluster, compressor, planner)
    return Session(membership, cluster, compressor, push_pull, planner, server)

"""The server's model as a state dict or a file, without a lease."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from psclient import settings as client_settings
from psclient.errors import ConfigurationError, ServerNotReadyError, from_refusal
from psclient.executor import SerialExecutor
from psclient.rpc.channel import Connection, RetryPolicy
from psclient.rpc.resolver import connect
from psclient.rpc.stream import Stream
from psclient.settings import ClientSettings
from pscore.model import modelfile
from pscore.model.buffers import packed_bytes, unpack
from pscore.model.layout import ModelLayout, Span
from pscore.names import shown
from pscore.wire import frames
from pscore.wire.dense import DenseReader, split_values
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import epoch
from pscore.wire.layouts import unpack_layout
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

_KEPT_BYTES = 31 << 20  # glibc returns a freed block of 32 MiB or more to the system in any case
_AGAIN_SECONDS = 0.1  # in which the other shards of a feed hear of what shard 0 has published
_WAIT_LONGER = "Raise --timeout (patience_seconds) to wait longer"


@dataclass(frozen=True, slots=True)
class _Part:
    header: pb.DownloadHeader
    layout: ModelLayout
    values: torch.Tensor
    buffers: list[torch.Tensor]


def download(
    server: str | Sequence[str],
    settings: ClientSettings | None = None,
    *,
    patience_seconds: float = 30.0,
    deadline_seconds: float = 30.0,
) -> modelfile.StateDict:
    """Fetch the server's model as a state dict: ``model.load_state_dict(psclient.download("host:50051"))``.

    Of a feed it is one version.

    Args:
        server: the address of each shard, as for an optimizer.
        settings: how the connection is secured; the default comes from the environment.
        patience_seconds: how long to try.
        deadline_seconds: how long nothing may come.

    Returns:
        Every parameter that the server has, in its own dtype, under all its names, and the buffers if the run has them.
        Parameters that were frozen are not among them; the log says so.

    Raises:
        ServerUnreachableError: no answer.
        ServerNotReadyError: the server has no model yet, or the shards of a feed no one version.
        ConfigurationError: the addresses are not those of all shards of one model.
        AccessError: the server asks for another token.
    """
    resolved = client_settings.resolve(settings, server, None)
    threads = [SerialExecutor("psclient-download")]
    connections = threads[0].call(
        lambda: connect(resolved.server, resolved.security, patience_seconds, _WAIT_LONGER, announce=False),
        lambda: None,
    )
    threads += [SerialExecutor("psclient-download") for _ in connections[1:]]
    end = time.monotonic() + patience_seconds
    try:
        while True:
            fetching = [
                thread.submit(partial(_fetch, each, patience_seconds, deadline_seconds))
                for thread, each in zip(threads, connections, strict=True)
            ]
            parts = [each.result() for each in fetching]  # an interrupt leaves threads that end with their calls
            headers = [part.header for part in parts]
            _check_places(connections, headers)
            versions = [header.version for header in headers]
            publications = {header.publication for header in headers}
            if not parts[0].layout.word_bytes or (len(publications) == 1 and "" not in publications):
                break
            if time.monotonic() > end:
                raise ServerNotReadyError(
                    f"the shards of the feed had versions {versions}, and in {patience_seconds:.0f} s no common one: a "
                    "version is published while they are read, or one of them lacks it until the next is published. "
                    "`psclient follow --once` waits for one version and fetches it whole"
                )
            time.sleep(_AGAIN_SECONDS)
    finally:
        for each in connections:
            each.close()
    first = parts[0]
    if first.layout.frozen:
        log.warning(
            "%d frozen parameters (%s, ...) are not on the server: what it has are the trained tensors; load them over "
            "the weights that the workers began with, by model.load_state_dict(state, strict=False)",
            len(first.layout.frozen),
            shown(first.layout.frozen[0].spec.name),
        )
    flat = first.values if len(parts) == 1 else torch.cat([part.values for part in parts])
    state = modelfile.assemble(first.layout, flat, first.buffers)
    for spec in first.layout.parameters:
        for alias in spec.aliases:
            state[alias] = state[spec.name]
    return state


def save(
    server: str | Sequence[str], path: str | Path, settings: ClientSettings | None = None, **limits: float
) -> Path:
    """Write the server's model to a safetensors file that loads into the plain model.

    Args:
        server: the address of each shard.
        path: where to write; replaced at once when the file is whole.
        settings: as for :func:`download`.
        **limits: as for :func:`download`.

    Raises:
        ConfigurationError: no safetensors file can be written there; or see :func:`download`.
    """
    try:
        modelfile.check_path(path)
    except modelfile.ModelFileError as error:
        raise ConfigurationError(str(error)) from error
    state = download(server, settings, **limits)
    path = Path(path)
    modelfile.write(path, {name: tensor.clone() for name, tensor in state.items()}, {"format": "pt"})
    return path


def _check_places(connections: Sequence[Connection], headers: Sequence[pb.DownloadHeader]) -> None:
    first = headers[0]
    if any(
        header.num_shards != len(headers)
        or header.shard_index != i
        or header.run_id not in (first.run_id, "")  # a shard that nobody has pushed to may not know it
        or epoch(header.generation) != epoch(first.generation)
        for i, header in enumerate(headers)
    ):
        seen = ", ".join(
            f"{each.address} is shard {header.shard_index} of {header.num_shards} of run {header.run_id}"
            for each, header in zip(connections, headers, strict=True)
        )
        raise ConfigurationError(f"give every shard of one run once, in order; {seen}")


def _fetch(connection: Connection, patience_seconds: float, deadline_seconds: float) -> _Part:
    bytearray(_KEPT_BYTES)  # freed at once: glibc then reuses a message's memory for the next, without fresh pages

    policy = RetryPolicy(patience_seconds, deadline_seconds, _WAIT_LONGER)

    def attempt(seconds: float) -> _Part:
        stream = Stream(connection.downloads, [pb.DownloadModelRequest().SerializeToString()])
        try:
            return _read(iter(lambda: stream.receive(seconds, policy.limit), None))
        finally:
            stream.close()

    part = connection.call(policy, attempt)
    if isinstance(part, Rejected):
        raise from_refusal(part) from None
    return part


def _read(responses: Iterator[bytes]) -> _Part:
    parse = pb.DownloadModelResponse.FromString
    first = parse(next(responses, b""))
    if first.WhichOneof("message") != "header":
        raise Rejected(ErrorCode.BAD_REQUEST, "a download begins with its header")
    header = first.header
    layout = unpack_layout(header.layout)
    if header.start + header.length > layout.size:
        raise Rejected(ErrorCode.BAD_REQUEST, "the shard's range leaves the model")
    specs = layout.buffers if header.buffer_bytes else ()
    model = DenseReader(Span(header.start, header.start + header.length), layout.value_dtype)
    raw = frames.BytesReader(header.buffer_bytes, packed_bytes(specs))
    for data in responses:
        message, values = split_values(data, several=False)
        response = parse(message)
        kind = response.WhichOneof("message")
        if kind == "chunk":
            model.read(response.chunk, *values)
        elif kind == "buffers":
            raw.read(response.buffers)
        elif kind == "commit":
            model.checksum.verify(response.commit)
            model.require_complete()
            return _Part(header, layout, model.values, unpack(raw.finish(), specs))
    raise AssertionError("a stream raises where it ends")

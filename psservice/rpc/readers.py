"""The calls of readers, who follow the model without a lease: messages to calls of the cuts and back."""

from collections.abc import Iterator
from functools import partial

from pscore.model.layout import Span
from pscore.reader.cut import ShardVersion
from pscore.wire import frames
from pscore.wire.codecs.names import PLAIN_INDEX_CODECS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from pscore.wire.messages import place_of, type_from_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.awaiting import NotYetError
from psservice.cuts.cuts import Cut
from psservice.cuts.shadow import ReaderType
from psservice.cuts.shard_cut import Held, ReaderForm
from psservice.rpc.calls import Call
from psservice.rpc.workers import dense_bytes
from psservice.shard.following import RUN_STATES
from psservice.shard.pull import link_class
from psservice.shard.shard import Shard


class ReaderCalls:
    """The calls of readers over one shard; each method serves the call that it is named after."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self._settings, self._metrics = shard, shard.settings, shard.metrics

    def await_cut(self, call: Call, request: pb.AwaitCutRequest) -> pb.AwaitCutResponse:
        """Name the newest cut once it is another than the known one, or the time is over."""
        shard = self._shard
        if not shard.is_coordinator:
            mine = place_of(self._settings.shard_index, self._settings.num_shards)
            raise Rejected(ErrorCode.SHARD_MISMATCH, f"shard 0 names the cuts; this is shard {mine}")
        relaying = shard.relaying
        if relaying is not None:
            relaying.hear_of_relays(request.relays)
            if relaying.identity in request.relays:
                raise Rejected(
                    ErrorCode.RELAY_RING,
                    f"the relay at {self._settings.listen} follows {self._settings.relay_of}, and that leads back to "
                    "this relay itself, so that none of them has a source",
                )
        model = shard.model
        if model is None:
            why = "no worker has uploaded a model yet, and nothing is published"
            raise NotYetError(ErrorCode.NOT_INITIALISED, why, lambda: shard.model is not None)
        cuts, dtype = shard.cuts, type_from_message(request.reader_type)
        newest, dtype = None if request.leaves else cuts.ask(dtype), cuts.type_of(dtype)
        cut = newest if newest is not None and dtype in newest.shards else None
        known = tuple(ShardVersion(each.generation, each.version, each.digest) for each in request.known)
        run_state = RUN_STATES[shard.run.state]
        has_cut = cut is not None and (known, request.buffers_digest) == (cut.shards[dtype], cut.buffers_digest)
        is_known = cut is None or (has_cut and request.run_state in (run_state, pb.RUN_STATE_UNSPECIFIED))
        if request.reader and request.leaves:
            cuts.readers.leave(request.reader)
        elif request.reader:
            cuts.readers.ask(request.reader, request.version, is_behind=cut is not None and not has_cut)
        if request.leaves:
            return pb.AwaitCutResponse()
        if is_known and ((call.wait_seconds and not call.is_late) or cut is None):
            why = cuts.trouble or "there is no newer cut yet"
            is_over = lambda: cuts.newest is not newest or RUN_STATES[shard.run.state] != run_state  # noqa: E731
            raise NotYetError(ErrorCode.BUSY, why, is_over)
        layout = model.layout
        return pb.AwaitCutResponse(
            cut=self._message(cut, dtype),
            layout=None if request.fingerprint == layout.fingerprint else shard.packed(layout),
            newest_version=max(model.version, 0 if relaying is None else relaying.source_version(0)),
            run_state=run_state,
        )

    def read_cut(self, call: Call, request: pb.ReadCutRequest) -> Iterator[bytes]:
        """Send what a reader lacks of a cut."""
        shard = self._shard
        with shard.memory.answer() as reservation:
            reservation.add(0)
            asked = request.version
            dtype = shard.cuts.type_of(type_from_message(request.reader_type))
            version = ShardVersion(asked.generation, asked.version, asked.digest)
            cut = shard.cuts.find(version, dtype, request.cut_buffers_digest)
            wire = WireForm(
                allowed=frozenset(request.index_codecs or PLAIN_INDEX_CODECS),
                link_bytes_per_second=link_class(request.link_bytes_per_second),
            )
            held, form = _held(cut.model.span.start, request), ReaderForm(wire, dtype, request.residues)
            find = partial(shard.cuts.values_of, cut)
            reply = cut.reply(held, form, self._settings.chunk_bytes, reservation.add, find)
            shard.cuts.sent(cut, held[-1].version)
            del find
            reservation.share(reply.messages)
            buffers = cut.buffers if request.buffers_digest != cut.buffers_digest else b""
            call.on_sent = self._sent
            self._metrics.count("ReadCut", 1, dense_bytes=dense_bytes(cut.model.layout, cut.model.span))
            yield pb.ReadCutResponse(
                header=pb.CutHeader(version=cut.version, buffer_bytes=len(buffers))
            ).SerializeToString()
            del cut  # a reply of values that were read needs it no more
            for piece in frames.encode_bytes(buffers, self._settings.chunk_bytes):
                yield pb.ReadCutResponse(buffers=piece).SerializeToString()
            yield from reply.messages

    def _message(self, cut: Cut | None, dtype: ReaderType) -> pb.Cut:
        assert cut is not None
        return pb.Cut(
            run_id=self._shard.run.run_id,
            shards=[pb.ShardVersion(**each._asdict()) for each in cut.shards[dtype]],
            buffers_digest=cut.buffers_digest,
            age_seconds=max(0.0, self._shard.environment.monotonic() - cut.made),
        )

    def _sent(self, nbytes: int) -> None:
        self._metrics.count("ReadCut", sent_bytes=nbytes)


def _held(start: int, request: pb.ReadCutRequest) -> list[Held]:
    held = []
    for each in request.held:
        held.append(Held(Span(start, each.end), each.version if each.has_version else None))
        start = each.end
    return held

"""The call of other shards to shard 0, and the thread in which another shard makes it."""

import hashlib
import logging
import random
import threading
from typing import Any

import grpc

from pscore.model.digest import DIGEST_BYTES
from pscore.net.alternatives import serving
from pscore.net.channels import ChannelError, Security, explain, open_channel
from pscore.wire.errors import ErrorCode, Rejected, details_of
from pscore.wire.messages import place_of
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.awaiting import NotYetError
from psservice.cuts.cuts import Part
from psservice.feed.relayed_shard import RelayedShard
from psservice.rpc.auth import Authenticator
from psservice.rpc.caller import Role
from psservice.rpc.calls import Call
from psservice.settings import ServerSettings
from psservice.shard.following import follow, news_of
from psservice.shard.shard import Shard

log = logging.getLogger(__name__)

LONGEST_SECONDS = 30.0
"""How long shard 0 holds an answer."""

_PROGRESS_SECONDS = 4.0  # how long instead if the shard has progress to tell, which it tells anew with each question

_START_SECONDS = 10.0  # of shard 0 of the same command
_FIND_SECONDS = 3.0  # for the servers that may be shard 0 to tell which serves
_ANSWER_SECONDS = 10.0  # beyond that, before shard 0 is taken for away
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
_COMPLAINT_SECONDS = 60.0
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel dials at once
)


class ShardCalls:
    """The calls of shards over shard 0; each method serves the call that it is named after."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def follow_run(self, call: Call, request: pb.FollowRunRequest) -> pb.FollowRunResponse:
        """Answer when there are news, or the time is over."""
        shard, settings = self._shard, self._shard.settings
        if not shard.is_coordinator or request.num_shards != settings.num_shards:
            meant = place_of(0, request.num_shards)
            mine = place_of(settings.shard_index, settings.num_shards)
            raise Rejected(ErrorCode.SHARD_MISMATCH, f"the shard takes this server for shard {meant}; it is {mine}")
        if request.cut:
            if not self._may_tell(call):
                raise Rejected(ErrorCode.PERMISSION_DENIED, "only shards tell of their part in a cut")
            version = request.version
            sizes = {len(digest) for digest in (version.digest, *request.more_digests)}
            if (
                not 0 < request.shard_index < settings.num_shards
                or sizes != {DIGEST_BYTES}
                or len(request.more_digests) > 2
            ):
                raise Rejected(ErrorCode.BAD_REQUEST, "a part of a cut is of a shard, and has a digest of 16 bytes")
            digests = version.digest, *request.more_digests
            told = Part(version.generation, version.version, digests, request.publication)
            shard.cuts.hear(request.shard_index, request.cut, told)
        if request.HasField("progress") and self._may_tell(call):
            if not 0 < request.progress.shard_index < settings.num_shards:
                raise Rejected(ErrorCode.BAD_REQUEST, "progress is of another shard than shard 0")
            shard.progress.hear(request.progress)
        if shard.relaying is not None and self._may_tell(call):
            shard.relaying.hear(request.shard_index, request.relayed, request.not_relayed)
        number, news = shard.news, news_of(shard)  # in this order: what changes from here on changes the number
        fingerprint = _fingerprint(news)
        if request.known == fingerprint and call.wait_seconds and not call.is_late:
            raise NotYetError(ErrorCode.BUSY, "there are no news", lambda: shard.news != number)
        return pb.FollowRunResponse(news=news, fingerprint=fingerprint)

    @staticmethod
    def _may_tell(call: Call) -> bool:
        """Tell whether a caller is a shard: readers may only ask."""
        return call.caller.is_shard or call.caller.role is Role.ADMIN


def question_of(shard: Shard, known: int) -> pb.FollowRunRequest:
    """Return the next question to shard 0; ``known`` is the fingerprint of the last news."""
    cut, part = shard.cuts.own()
    version, more = None, list[bytes]()
    if part is not None:
        first, *more = part.digests
        version = pb.ShardVersion(generation=part.generation, version=part.version, digest=first)
    model, relaying, progress = shard.model, shard.relaying, shard.progress.own
    return pb.FollowRunRequest(
        shard_index=shard.settings.shard_index,
        num_shards=shard.settings.num_shards,
        known=known,
        wait_seconds=LONGEST_SECONDS if progress is None else _PROGRESS_SECONDS,
        cut=cut,
        version=version,
        more_digests=more,
        relayed=model.cuts_here() if isinstance(model, RelayedShard) else (),
        not_relayed="" if relaying is None else relaying.failed,
        publication="" if part is None else part.publication,
        progress=progress,
    )


def _fingerprint(news: pb.RunNews) -> int:
    digest = hashlib.blake2b(news.SerializeToString(deterministic=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class Follower:
    """Follows shard 0 in a thread, from the start until :meth:`close`; shard 0 may be away for any time.

    A call shows the token of a shard. Over TLS the shard shows its own certificate, and shard 0's must descend from
    ``--coordinator-ca``.
    """

    def __init__(self, shard: Shard, authenticator: Authenticator) -> None:
        self._shard, self._authenticator = shard, authenticator
        self._closing, self._has_more = threading.Event(), threading.Event()
        self._call: Any = None
        self._complained = 0.0
        self._began, self._has_followed = shard.environment.monotonic(), False
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._thread.start()

    def ask_now(self) -> None:
        """Have shard 0 hear at once what this shard has to tell; from any thread."""
        self._has_more.set()
        if (call := self._call) is not None:
            call.cancel()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if (call := self._call) is not None:
            call.cancel()
        self._thread.join()

    def _follow(self) -> None:
        settings, known = self._shard.settings, 0
        pause = _SHORTEST_PAUSE_SECONDS
        while not self._closing.is_set():
            try:
                security = security_of(settings)
                coordinator = settings.coordinator
                if not settings.coordinator_is_here:
                    coordinator = serving(coordinator, security, _FIND_SECONDS)
                with open_channel(coordinator, security, _CHANNEL_OPTIONS) as channel:
                    stub = ParameterServerServiceStub(channel)
                    while not self._closing.is_set():
                        answer = self._ask(stub, known)
                        if answer is None:
                            continue
                        follow(self._shard, answer.news)
                        self._has_followed = True
                        known, pause = answer.fingerprint, _SHORTEST_PAUSE_SECONDS
                        self._shard.metrics.follows_coordinator.set(1)
            except (grpc.RpcError, grpc.FutureCancelledError, ChannelError, Rejected) as error:
                self._complain(error)
            except Exception as error:  # whatever it was, the thread lives on and asks again
                log.exception("what shard 0 told cannot be followed", exc_info=error)
            self._shard.metrics.follows_coordinator.set(0)
            if self._shard.relaying is not None:
                self._shard.relaying.aim_at_nothing()
            known = 0  # so that what could not be done comes again
            self._closing.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _ask(self, stub: ParameterServerServiceStub, known: int) -> pb.FollowRunResponse | None:
        """Return the answer; ``None`` if this shard has more to tell."""
        self._has_more.clear()  # before it is told
        request = question_of(self._shard, known)
        token = self._authenticator.shard_token()
        metadata = (("authorization", token),) if token else None
        self._call = stub.FollowRun.future(request, timeout=LONGEST_SECONDS + _ANSWER_SECONDS, metadata=metadata)
        if self._closing.is_set() or self._has_more.is_set():  # another thread has not seen this call
            self._call.cancel()
        try:
            answer: pb.FollowRunResponse = self._call.result()
        except grpc.FutureCancelledError:
            if self._closing.is_set() or not self._has_more.is_set():
                raise
            return None
        return answer

    def _is_starting(self) -> bool:
        """Tell whether shard 0 of the same command may still be on its way."""
        age = self._shard.environment.monotonic() - self._began
        return self._shard.settings.coordinator_is_here and not self._has_followed and age < _START_SECONDS

    def _complain(self, error: Exception) -> None:
        """Log at the first failure, and then once a minute; not that shard 0 stops in order, as this one does next."""
        if self._closing.is_set():
            return
        if isinstance(error, grpc.RpcError) and details_of(error).reason is ErrorCode.DRAINING:
            return  # if shard 0 stays away, the next attempt finds that out
        if self._is_starting():
            return
        address = self._shard.settings.coordinator
        why = explain(error, address) if isinstance(error, grpc.RpcError) else str(error)
        now = self._shard.environment.monotonic()
        if not self._complained or now - self._complained >= _COMPLAINT_SECONDS:
            self._complained = now
            what = "shard 0 cannot be followed (--coordinator): this shard serves on, and takes snapshots by itself"
            if self._shard.relaying is not None:
                what = "shard 0 cannot be followed: readers of this relay keep the version that is here"
            log.warning(
                what,
                extra={"coordinator": address, "error": why},
            )


def security_of(settings: ServerSettings) -> Security:
    """Return how a shard protects its channel to shard 0."""
    if settings.coordinator_is_here or not settings.tls_cert:
        return Security()
    ca = settings.coordinator_ca or settings.tls_client_ca
    return Security(ca, settings.tls_cert, settings.tls_key, settings.tls_server_name)

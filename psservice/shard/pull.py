"""A pull, from its request to its reply."""

import math
from dataclasses import replace

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from psservice.membership.leases import Member
from psservice.replies.exact_reply import Reserve
from psservice.replies.reply_session import PullRequest, Reply, ReplyMaker
from psservice.shard.lifecycle import close_due_rounds
from psservice.shard.shard import Shard
from psservice.state.run import RunState


def pull(
    shard: Shard, member: Member, generation: int, request: PullRequest, reserve: Reserve = lambda nbytes: None
) -> Reply:
    """Answer a live member's pull, exactly or top-k; ``reserve`` charges what the answer occupies, before it is made.

    The answer may be sent after ``durability.records.wait``.
    """
    if request.base_end and not shard.span.start < request.base_end <= shard.span.end:
        raise Rejected(
            ErrorCode.BAD_REQUEST, f"base_end is {request.base_end}; it must be an index that the shard owns"
        )
    close_due_rounds(shard)
    synchronizer = shard.synchronizer  # of the model that is served; a worker hears of another one only after that
    if synchronizer is not None and shard.run.state is RunState.TRAINING:
        synchronizer.require_closed(member.identity.worker_id)
    model, base_version = shard.require_model(generation), request.base_version
    if synchronizer is not None:
        model, base_version = synchronizer.model_for(member, base_version, request.acknowledged)
    form = WireForm(allowed=member.worker.index_codecs, link_bytes_per_second=link_class(request.link_bytes_per_second))
    seen = request if base_version == request.base_version else replace(request, base_version=base_version)
    topk = shard.topk.asked(request.density, request.value)
    reply = ReplyMaker(model, shard.apply_thread, member.downlink, topk, seen, form, reserve).answer()
    shard.apply_thread.require_whole()  # a top-k reply is read beside the apply thread
    member.reply_mode, member.reply_density = reply.mode, reply.density
    shard.metrics.observe_pull(reply.mode.value, reply.density)
    return reply


def link_class(bytes_per_second: float) -> float:
    """Round the rate of a link to a power of 4; 0 if it is not known. Workers of one class share replies."""
    if not 1 <= bytes_per_second < math.inf:
        return 0.0
    return 4.0 ** round(math.log(bytes_per_second, 4))

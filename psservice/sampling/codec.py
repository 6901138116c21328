"""Data leases as messages, as records of the journal, and as a part of a snapshot's manifest; everything is checked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from google.protobuf.message import Message

from pscore.model.ranges import Ranges
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.messages import share_to_messages
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.sampling.dataset import (
    MOST_DATASETS,
    MOST_EPOCHS,
    MOST_RANGES,
    MOST_SIZE,
    Dataset,
    Datasets,
    Epoch,
    Leased,
    Plan,
    SampleRequest,
    Share,
)
from psservice.types import Identity
from psservice.wire.identity import identity_from_message, identity_to_message, require_name

_ASKS_A_SECOND = 20  # of all workers together that wait for an epoch's end
_SHORTEST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.2, 2.0


def sample_request_of(request: pb.LeaseSamplesRequest) -> SampleRequest:
    """Read a request whose numbers are within their bounds; raises :class:`Rejected` (``BAD_REQUEST``)."""
    require_name("a dataset's name", request.dataset)
    plan = Plan(request.size, request.seed, request.shuffle)
    epoch = request.epoch if request.has_epoch else None
    return SampleRequest(request.dataset, plan, epoch, request.samples, share_of(request.held, request.size))


def finished_of(header: pb.PushHeader) -> dict[str, Share]:
    """Read which samples a push finishes, by dataset; raises :class:`Rejected` (``BAD_REQUEST``)."""
    if len(header.finished) > MOST_DATASETS or sum(len(each.ranges) for each in header.finished) > MOST_RANGES:
        raise Rejected(
            ErrorCode.BAD_REQUEST, f"a push finishes at most {MOST_RANGES} ranges of {MOST_DATASETS} datasets"
        )
    found: dict[str, Share] = {}
    for each in header.finished:
        require_name("a dataset's name", each.dataset)
        if each.dataset in found:
            raise Rejected(ErrorCode.BAD_REQUEST, f"dataset {each.dataset!r} is named twice")
        found[each.dataset] = share_of(each.ranges, MOST_SIZE)
    return found


def share_of(messages: Sequence[pb.SampleRange], size: int) -> dict[int, Ranges]:
    """Read ranges of samples, by epoch; raises :class:`Rejected` (``BAD_REQUEST``) where one leaves the dataset."""
    if len(messages) > MOST_RANGES:
        raise Rejected(
            ErrorCode.BAD_REQUEST, f"{len(messages)} ranges of samples; a message names at most {MOST_RANGES}"
        )
    pairs: dict[int, list[tuple[int, int]]] = {}
    for each in messages:
        end = each.start + each.count
        if not each.count or end > size or each.epoch >= MOST_EPOCHS:
            raise Rejected(
                ErrorCode.BAD_REQUEST, f"a dataset of {size} has no samples [{each.start}, {end}) of epoch {each.epoch}"
            )
        pairs.setdefault(each.epoch, []).append((each.start, end))
    return {epoch: Ranges(found) for epoch, found in pairs.items()}


def answer_to_message(leased: Leased, live_workers: int) -> pb.LeaseSamplesResponse:
    """Write an answer; the delay spreads those that wait, so that together they do not ask too often."""
    retry_seconds = min(_LONGEST_RETRY_SECONDS, max(_SHORTEST_RETRY_SECONDS, live_workers / _ASKS_A_SECOND))
    return pb.LeaseSamplesResponse(
        granted=share_to_messages(leased.granted),
        lost=share_to_messages(leased.lost),
        epoch=leased.after.newest,
        samples_elsewhere=leased.held_by_others,
        retry_seconds=0.0 if leased.granted else retry_seconds,
    )


def record_of(identity: Identity, asked: SampleRequest, leased: Leased) -> list[Message]:
    """Return a record's messages: the request, what was granted, and the workers whose places were returned before."""
    request = pb.LeaseSamplesRequest(
        identity=identity_to_message(identity),
        dataset=asked.dataset,
        **asdict(asked.plan),
        has_epoch=asked.epoch is not None,
        epoch=asked.epoch or 0,
        held=share_to_messages(asked.held),
    )
    response = pb.LeaseSamplesResponse(granted=share_to_messages(leased.granted))
    return [request, response, *(pb.LeaveRequest(identity=identity_to_message(gone)) for gone in leased.gone)]


def replay_record(datasets: Datasets, messages: Sequence[bytes]) -> None:
    """Repeat a record; raises :class:`Rejected` or ``ValueError`` where it makes no sense."""
    first, second, *others = messages
    request, response = pb.LeaseSamplesRequest.FromString(first), pb.LeaseSamplesResponse.FromString(second)
    gone = frozenset(identity_from_message(pb.LeaveRequest.FromString(each).identity) for each in others)
    granted = share_of(response.granted, request.size)
    datasets.redo(identity_from_message(request.identity), sample_request_of(request), granted, gone)


def to_plain(datasets: Datasets) -> list[Any]:
    """Write all datasets as values that JSON has, for a manifest."""

    def shares(found: Mapping[Identity, Ranges]) -> list[Any]:
        return [[*holder, list(ranges)] for holder, ranges in found.items()]

    def epochs(found: Mapping[int, Epoch]) -> list[Any]:
        return [[n, epoch.fresh, shares(epoch.held), shares(epoch.returned)] for n, epoch in found.items()]

    return [[name, *astuple(each.plan), each.newest, epochs(each.epochs)] for name, each in datasets.items()]


def from_plain(plain: Iterable[Any]) -> Datasets:
    """Read what :func:`to_plain` has written."""

    def shares(found: Iterable[Any]) -> dict[Identity, Ranges]:
        return {Identity(*holder): Ranges((start, end) for start, end in ranges) for *holder, ranges in found}

    def epochs(found: Iterable[Any]) -> dict[int, Epoch]:
        return {number: Epoch(fresh, shares(held), shares(returned)) for number, fresh, held, returned in found}

    return Datasets({name: Dataset(Plan(*plan), newest, epochs(found)) for name, *plan, newest, found in plain})

"""Data leases as messages, and as a part of a snapshot's manifest; everything is checked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from pscore.model.ranges import Ranges
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.messages import share_from_messages, share_to_messages
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.data_leases.dataset import (
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
from psservice.values import Identity, require_name


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
    """Read ranges of samples, by epoch; raises :class:`Rejected` (``BAD_REQUEST``) if one leaves the dataset."""
    if len(messages) > MOST_RANGES:
        raise Rejected(
            ErrorCode.BAD_REQUEST, f"{len(messages)} ranges of samples; a message names at most {MOST_RANGES}"
        )
    for each in messages:
        end = each.start + each.count
        if not each.count or end > size or each.epoch >= MOST_EPOCHS:
            raise Rejected(
                ErrorCode.BAD_REQUEST, f"a dataset of {size} has no samples [{each.start}, {end}) of epoch {each.epoch}"
            )
    return share_from_messages(messages)


def answer_to_message(leased: Leased, run_state: pb.RunState.ValueType) -> pb.LeaseSamplesResponse:
    """Write an answer."""
    return pb.LeaseSamplesResponse(
        granted=share_to_messages(leased.granted),
        lost=share_to_messages(leased.lost),
        epoch=leased.after.newest,
        samples_elsewhere=leased.held_by_others,
        run_state=run_state,
    )


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

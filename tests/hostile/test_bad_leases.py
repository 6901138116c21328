"""Calls for samples that lie: names, sizes, ranges out of bounds, and what others hold."""

import uuid

import pytest

from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.hostile.test_bad_calls import BAD_REQUEST, GOOD, STRANGERS, as_, header, push
from tests.system.raw import TIMEOUT, joined, refusal

SIZE = 100


@pytest.fixture
def dataset():
    return f"d-{uuid.uuid4()}"


def lease(worker, dataset, **fields):
    fields = {"identity": worker.identity, "dataset": dataset, "size": SIZE, "samples": 10, "has_epoch": True} | fields
    return worker.stub.LeaseSamples(pb.LeaseSamplesRequest(**fields), timeout=TIMEOUT)


def places(messages):
    return {(each.epoch, i) for each in messages for i in range(each.start, each.start + each.count)}


def samples(*ranges, epoch=0):
    return [pb.SampleRange(epoch=epoch, start=start, count=count) for start, count in ranges]


OUT_OF_BOUNDS = {
    "no name": {"dataset": ""},
    "a long name": {"dataset": "x" * 1000},
    "a name with a line end": {"dataset": "a\nb"},
    "no samples": {"size": 0},
    "a huge size": {"size": 2**64 - 1},
    "a huge wish": {"samples": 2**64 - 1},
    "a huge epoch": {"epoch": 2**64 - 1},
    "holds what is beyond the dataset": {"held": samples((SIZE - 1, 2))},
    "holds what is far beyond it": {"held": samples((2**64 - 1, 2**64 - 1))},
    "holds nothing": {"held": samples((5, 0))},
    "holds of a huge epoch": {"held": samples((0, 1), epoch=2**63)},
    "holds too many pieces": {"held": samples(*[(2 * i, 1) for i in range(5000)]), "size": 2**20},
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_out_of_bounds(worker, dataset, name):
    fields = {"dataset": dataset} | OUT_OF_BOUNDS[name]
    assert refusal(lambda: lease(worker, **fields)) == BAD_REQUEST
    assert lease(worker, dataset).granted


FINISHED = {
    "no name": [pb.FinishedSamples(ranges=samples((0, 1)))],
    "one name twice": 2 * [pb.FinishedSamples(dataset="a", ranges=samples((0, 1)))],
    "too many names": [pb.FinishedSamples(dataset=f"{i}") for i in range(65)],
    "too many ranges": [pb.FinishedSamples(dataset="a", ranges=samples(*[(2 * i, 1) for i in range(5000)]))],
    "an empty range": [pb.FinishedSamples(dataset="a", ranges=samples((0, 0)))],
    "a range without end": [pb.FinishedSamples(dataset="a", ranges=samples((2**64 - 1, 2**64 - 1)))],
}


@pytest.mark.parametrize("name", FINISHED)
def test_a_push_that_finishes_nonsense_is_refused_and_not_applied(worker, name):
    answer = refusal(lambda: push(worker, GOOD, head=header(worker, finished=FINISHED[name])))
    assert answer == BAD_REQUEST
    before = worker.version
    worker.pull()
    assert worker.version == before


def test_what_another_holds_can_be_neither_had_nor_finished(server, worker, dataset):
    other = joined(server.addresses[0])
    theirs = lease(other, dataset).granted
    answer = lease(worker, dataset, held=theirs)
    assert places(answer.lost) == places(theirs)
    assert not places(answer.granted) & places(theirs)
    finished = [pb.FinishedSamples(dataset=dataset, ranges=samples((0, SIZE)))]
    push(worker, GOOD, head=header(worker, finished=finished))
    assert places(lease(other, dataset, samples=0).granted) == places(theirs)
    assert not lease(other, dataset, samples=0, held=theirs).lost


def test_another_dataset_under_the_same_name(worker, dataset):
    lease(worker, dataset)
    for fields in ({"size": SIZE + 1}, {"seed": 1}, {"shuffle": True}):
        answer = refusal(lambda fields=fields: lease(worker, dataset, **fields))
        assert answer == ("FAILED_PRECONDITION", "SETTINGS_MISMATCH")


@pytest.mark.parametrize(("fields", "expected"), STRANGERS)
def test_who_is_not_a_worker_of_the_run(worker, dataset, fields, expected):
    assert refusal(lambda: lease(worker, dataset, identity=as_(worker, **fields))) == expected


def test_a_greedy_worker_leaves_the_others_their_part(server, worker, dataset):
    """It asks for everything, and again without admitting what it holds: half of what is left is all it is given."""
    other = joined(server.addresses[0])
    first = lease(worker, dataset, samples=2**24).granted
    assert len(places(first)) <= SIZE / 2
    assert places(lease(worker, dataset, samples=2**24).granted) == places(first)  # it does not admit what it holds
    assert lease(other, dataset).granted

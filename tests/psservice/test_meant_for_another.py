"""A call that is meant for another shard is refused before anything of it is looked at."""

import pytest
import torch

from pscore.messages import SHARD_HEADER, place_of
from pscore.v1 import parameter_server_pb2 as pb
from psservice.engine import Engine
from psservice.metrics import Metrics
from psservice.security import Gate
from psservice.servicer import ParameterServerServicer
from psservice.settings import ServerSettings
from tests.hostile.service import SERVICE, Context, Ended


class Meant(Context):
    """A call that says which shard it is meant for."""

    def __init__(self, place):
        self.place = place

    def invocation_metadata(self):
        return ((SHARD_HEADER, self.place),)


@pytest.fixture
def servicer():
    engine = Engine(ServerSettings(shard_index=1, num_shards=3), torch.device("cpu"), Metrics())
    yield ParameterServerServicer(engine, Gate(None))
    engine.close()


def unread():
    raise AssertionError("a message was read")
    yield


def call(servicer, method, place):
    request = unread() if method.client_streaming else getattr(pb, method.input_type.name)()
    answer = getattr(servicer, method.name)(request, Meant(place))
    return next(answer) if method.server_streaming else answer


@pytest.mark.parametrize("method", [*SERVICE.methods], ids=lambda method: method.name)
@pytest.mark.parametrize("place", ["0 of 3", "1 of 2", "", "x" * 10_000])
def test_every_call_is_refused(servicer, method, place):
    with pytest.raises(Ended, match=r"shard .*; it is shard 1 of 3 \(SHARD_MISMATCH") as ended:
        call(servicer, method, place)
    assert len(str(ended.value)) < 300


def test_who_means_this_shard_or_does_not_say_is_heard(servicer):
    for context in (Meant(place_of(1, 3)), Context()):
        assert servicer.GetStatus(pb.GetStatusRequest(), context).shard_index == 1

"""The link of the merging benchmark counts messages however they are cut, and makes each of them wait."""

import time

import pytest
import torch

import psclient
from benchmarks.mgs.models import MODELS
from benchmarks.mgs.slowlink import MessageCounter, slow_link
from psclient.rpc.download import download
from psclient.rpc.local_server import LocalServer

STARTUP = 0.2


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_messages_are_counted_wherever_they_are_cut(piece):
    stream = b"".join(b"\0" + size.to_bytes(4) + b"x" * size for size in (0, 5, 300, 1))
    counter = MessageCounter()
    assert sum(counter.feed(stream[start : start + piece]) for start in range(0, len(stream), piece)) == 4


def test_the_papers_models_have_their_published_sizes():
    layouts = {name: make().layout for name, make in MODELS.items()}
    assert {name: (len(layout.parameters), layout.size) for name, layout in layouts.items()} == {
        "resnet50": (161, 25_557_032),
        "cifar_vgg16": (54, 14_728_266),
        "vgg16": (32, 138_357_544),
        "inception_v4": (449, 42_679_816),
        "lstm": (11, 66_034_000),
    }


def test_a_call_through_the_link_waits_for_its_message():
    layer = torch.nn.Linear(3, 1)
    with (
        LocalServer() as server,
        psclient.DGS(layer.parameters(), 0.1, model=layer, server=server),
        slow_link(server.server, STARTUP, 0.0) as address,
    ):
        started = time.perf_counter()
        assert torch.equal(download(address)["weight"], layer.weight.detach())
        assert time.perf_counter() - started >= STARTUP

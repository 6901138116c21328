"""In which CUDA streams work is launched, on devices that are not there."""

import threading
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import nn

import psclient
from psclient.compress.selector import Selector
from psclient.engine import engine
from psclient.engine import overlap as overlapping
from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from pscore.selection.cuda import launches as cuda
from tests.system.tools import QUICK, make_data, make_model, train_step

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_cuda.py has real streams")
DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Stream:
    """A stream that notes what it is asked for."""

    notes: ClassVar[list] = []

    def __init__(self, device=None, owner="new"):
        self.device, self.name = device, f"{owner} {device}"

    def record_event(self):
        return self.name

    def wait_event(self, event):
        self.notes.append((self.name, "after", event))

    def wait_stream(self, other):
        self.wait_event(other.name)

    def synchronize(self):
        self.notes.append((self.name, "awaited"))


@pytest.fixture
def entered(monkeypatch):
    """Return a function that tells in which streams the calling thread is."""
    here = threading.local()
    monkeypatch.setattr(Stream, "notes", [])

    @contextmanager
    def stream(given):
        before = getattr(here, "names", [])
        here.names = [*before, given.name]
        yield
        here.names = before

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(device, "user"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return lambda: getattr(here, "names", [])


@pytest.mark.parametrize("overlap", [False, True])
def test_work_goes_on_in_the_streams_of_all_devices(overlap, entered, monkeypatch):
    found = {"compress": [], "restore": []}
    for module in (engine, overlapping):
        monkeypatch.setattr(module, "devices_of", lambda _: DEVICES)
    for name, seen in found.items():
        call = getattr(Selector, name)
        monkeypatch.setattr(
            Selector, name, lambda *a, call=call, seen=seen: seen.append((entered(), len(Stream.notes))) or call(*a)
        )
    with LocalServer(down_mode="exact") as server:
        model = make_model(batch_norm=False)
        options = {"density": 0.2, "model": model, "server": server, "settings": QUICK, "overlap": overlap}
        with psclient.DGS(model.parameters(), lr=0.1, **options) as optimizer:
            for _ in range(2):
                train_step(model, optimizer, *make_data())
    owned = ["new cuda:0", "new cuda:1"] if overlap else ["user cuda:0", "user cuda:1", "user None"]
    before = found["compress"][0][1]
    assert all(names == owned for names, _ in found["compress"] + [each for each in found["restore"] if overlap])
    if overlap:
        waited = Stream.notes[:before]
        assert {(new, "after", f"user {device}") for new in owned for device in DEVICES} <= set(waited)
        awaited = [number for number, note in enumerate(Stream.notes) if note == (owned[0], "awaited")]
        assert before <= awaited[0]


def test_an_error_between_launches_leaves_nothing_under_way(entered):
    def launch():
        with cuda.SideStream(DEVICES[1]).entered():
            assert entered() == ["new cuda:1"]
            raise MemoryError

    with pytest.raises(MemoryError):
        launch()
    assert Stream.notes == [("new cuda:1", "after", "user cuda:1"), ("new cuda:1", "awaited")]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_graph_that_is_captured_refuses_a_step_and_says_what_to_do(overlap, entered, monkeypatch):
    with LocalServer() as server:
        w = nn.Parameter(torch.ones(10))
        with psclient.DGS([w], lr=0.1, server=server, settings=QUICK, overlap=overlap) as optimizer:
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                for call in (w.sum().backward if overlap else optimizer.step, optimizer.pull, optimizer.flush):
                    with pytest.raises(ConfigurationError, match="call step\\(\\) after each replay"):
                        call()
            optimizer.zero_grad()
            w.sum().backward()
            optimizer.step()
            assert optimizer.report.step == 1

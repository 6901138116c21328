"""With overlap, a group is sent after its gradients on every GPU that has some of them."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from psclient.engine import overlap
from psclient.engine.overlap import Overlap


class Stream:
    """A CUDA stream that notes which events it waits for."""

    def __init__(self, name):
        self.name, self.waited = name, []

    def record_event(self):
        return self.name

    def wait_event(self, event):
        self.waited.append(event)

    def synchronize(self):
        self.waited.append("done")


def test_a_group_waits_for_the_streams_of_all_its_gradients(monkeypatch):
    gpus = [torch.device("cuda", number) for number in range(2)]
    here = dict(zip(gpus, map(Stream, ("step 0", "step 1")), strict=True))
    backward = dict(zip(gpus, map(Stream, ("backward 0", "backward 1")), strict=True))
    current, sent = dict(backward), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[device])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(overlap, "finite", lambda model, gradients: gradients)
    own = object.__new__(Overlap)
    own._paused, own._seen, own._missing, own._group_of = False, {2}, [3], {0: 0, 1: 0, 2: 0}
    own._counting = threading.Lock()
    own._used, own._versions, own._jobs, own._report = set(), [], {}, "report"
    own._clock = SimpleNamespace(note=lambda position: None)
    own._model = SimpleNamespace(parameters=[SimpleNamespace(device=device) for device in gpus])
    own._devices, own._streams = gpus, [Stream(f"side {device.index}") for device in gpus]
    own._gather = lambda group: {}
    own._compressing = SimpleNamespace(submit=lambda work: work())
    own._engine = SimpleNamespace(
        grouping=SimpleNamespace(groups=[range(3)]), send_gradients=lambda *arguments: sent.append(arguments)
    )
    own.ready(1)
    current.update(here)
    own.ready(0)
    assert sent == []
    own._submit(0)
    assert len(sent) == 1
    for stream in own._streams:
        assert {*stream.waited[:-1]} == {"backward 1", "step 0", "step 1"}
        assert stream.waited[-1] == "done", "what a group has launched is done when others may read it"


def test_hooks_of_several_devices_count_one_after_the_other():
    """Autograd calls them in a thread for each device; the first of a step counts the members of all groups."""
    own = object.__new__(Overlap)
    own._paused, own._seen, own._missing, own._group_of = False, set(), [0], {}
    own._counting = threading.Lock()
    own._used, own._versions, own._jobs, own._devices = set(), [], {}, []
    own._clock = SimpleNamespace(note=lambda position: None)
    own._model = SimpleNamespace(parameters=[SimpleNamespace(device=torch.device("cpu"))] * 2)
    own._engine = SimpleNamespace(grouping=SimpleNamespace(groups=[range(2)]))
    submitted, others = [], []
    own._submit = submitted.append

    def count_members():
        own._group_of, missing = {0: 0, 1: 0}, [2]
        if not others:
            others.append(threading.Thread(target=own.ready, args=(1,)))
            others[0].start()
            others[0].join(0.2)  # without a lock the other hook is through by then, and its count is lost
        own._missing = missing

    own._count_members = count_members
    own.ready(0)
    others[0].join()
    assert submitted == [0]

"""With overlap, a group is sent after its gradients on every GPU that has some of them."""

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
    own._used, own._versions, own._jobs, own._report = set(), [], {}, "report"
    own._clock = SimpleNamespace(note=lambda position: None)
    own._model = SimpleNamespace(parameters=[SimpleNamespace(device=device) for device in gpus])
    own._devices, own._streams = gpus, [Stream(f"side {device.index}") for device in gpus]
    own._gather = lambda group: {}
    own._compressing = SimpleNamespace(submit=lambda work: work())
    own._push_pull = SimpleNamespace(groups=[range(3)], send_gradients=lambda *arguments: sent.append(arguments))
    own.ready(1)
    current.update(here)
    own.ready(0)
    assert sent == []
    own._submit(0)
    assert len(sent) == 1
    for stream in own._streams:
        assert {*stream.waited[:-1]} == {"backward 1", "step 0", "step 1"}
        assert stream.waited[-1] == "done", "what a group has launched is done when others may read it"

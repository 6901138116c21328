"""What tests of followers share: a run of small steps, and every version that it has had, bit by bit."""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

import psclient
from psclient.reader.directory_sink import INDEX
from psclient.settings import ClientSettings
from tests.system.tools import QUICK, make_data, make_model, train_step

READING = ClientSettings(server="local", deadline_seconds=5)
SECONDS = 60.0


def parameters_of(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Training:
    """A worker whose model is the server's at every version; ``versions`` has all that there were."""

    def __init__(self, server, **options):
        self.model = make_model()
        self.optimizer = psclient.ASGD(
            self.model.parameters(), **{"lr": 0.05, "model": self.model, "server": server, "settings": QUICK, **options}
        )
        self.versions = {self.optimizer.version: parameters_of(self.model)}

    def steps(self, count=1):
        for _ in range(count):
            train_step(self.model, self.optimizer, *make_data())
            self.versions[self.optimizer.version] = parameters_of(self.model)
        return self.optimizer.version


@contextmanager
def training(server, **options):
    found = Training(server, **options)
    with found.optimizer:
        yield found


def loaded(path):
    """Read a directory by its index, as another program does; return the cut's description and the tensors."""
    index = json.loads((Path(path) / INDEX).read_text())
    weight_map, found = index["weight_map"], {}
    for file in dict.fromkeys(weight_map.values()):
        with safe_open(Path(path) / file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return index["metadata"]["sparseps"], {name: found[name] for name in weight_map}


class SleepyEngine:
    """Takes patches; fails in the middle of some commits, counted from 1, and cannot undo them."""

    def __init__(self, fails_at=()):
        self.tensors, self.staged, self.commits, self.fails_at = {}, [], 0, set(fails_at)

    def stage(self, cut, patches):
        self.staged = patches

    def commit(self, cut):
        self.commits += 1
        for number, patch in enumerate(self.staged):
            if number == 1 and self.commits in self.fails_at:
                raise RuntimeError("asleep")
            if patch.indices is None:
                self.tensors[patch.name] = patch.values.clone()
            else:
                self.tensors[patch.name].view(-1)[patch.indices] = patch.values

    def abort(self):
        self.staged = []

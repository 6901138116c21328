"""The peaks of a worker and a server, phase by phase, with a model that is small."""

import torch

from benchmarks.scale import memory
from benchmarks.scale.memory_worker import model_of


def test_every_phase_has_its_peaks(tmp_path, capsys):
    flags = ["--shape=tensors", "--elements=1000000", "--method=asgd", "--steps=2", f"--disk={tmp_path}"]
    assert memory.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:22].strip(): line[22:].split() for line in lines[-9:-1]}
    phases = ["imports", "model", "join", "first step", "steps", "snapshot", "restart", "another worker joins"]
    assert list(rows) == phases
    for worker_peak, worker, server_peak, server in (map(float, row) for row in rows.values()):
        assert 0 < worker <= worker_peak
        assert 0 < server <= server_peak
    assert lines[-1] == "999,424 elements, 999,424 of them trained in 4 tensors"


def test_models_have_about_the_elements_that_were_asked_for():
    for shape, elements in (("transformer", 30_000_000), ("lora", 30_000_000), ("tensors", 4_000_000)):
        found = sum(parameter.numel() for parameter in model_of(shape, elements, torch.bfloat16).parameters())
        assert abs(found - elements) < 0.1 * elements

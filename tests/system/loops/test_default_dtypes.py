"""Torch's default dtype and device are the program's: whatever they are, the same bytes travel and are saved."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import psclient
from tests.system.tools import optimizer_of

DEFAULTS = {
    "float64": lambda: torch.set_default_dtype(torch.float64),
    "bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "float16": lambda: torch.set_default_dtype(torch.float16),
    "meta": lambda: torch.set_default_device("meta"),
}


@contextmanager
def defaults(name):
    try:
        DEFAULTS[name]()
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def model_of(sizes, dtype):
    generator = torch.Generator().manual_seed(0)
    made = nn.Sequential(*(nn.Linear(i, o, dtype=dtype, device="cpu") for i, o in sizes))
    made.append(nn.BatchNorm1d(sizes[-1][1], dtype=dtype, device="cpu"))
    with torch.no_grad():
        for parameter in made.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            parameter.copy_(values)
    return made


def trained(make, sizes, dtype, path):
    """What a worker and a later one have after some steps, what is downloaded, and what is saved."""
    found = []
    with psclient.LocalServer(down_mode="exact") as server:
        for worker in ("first", "second"):
            model = model_of(sizes, dtype)
            with make(model, lr=0.01, server=server, worker=worker) as optimizer:
                for seed in range(3):
                    generator = torch.Generator().manual_seed(seed)
                    shape = (8, sizes[0][0])
                    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
                    optimizer.zero_grad()
                    model(x).square().sum().backward()
                    optimizer.step()
                optimizer.flush()
                optimizer.pull()
                optimizer.load_state_dict(optimizer.state_dict())
            found.append({name: each.clone() for name, each in model.state_dict().items()})
        found.append(psclient.download(server.server))
        psclient.save(server.server, path)
        found.append(load_file(path))
    return found


DGS = partial(optimizer_of, "dgs", weight_decay=0.01, density=0.1)


@pytest.mark.parametrize(
    ("make", "sizes", "dtype"),
    [
        (DGS, [(5, 4)], torch.float32),
        (DGS, [(200, 100), (100, 10)], torch.float32),
        pytest.param(DGS, [(200, 100), (100, 10)], torch.bfloat16, marks=pytest.mark.long),
        pytest.param(partial(optimizer_of, "adamw"), [(5, 4)], torch.float32, marks=pytest.mark.long),
        pytest.param(partial(optimizer_of, "outer"), [(5, 4)], torch.float32, marks=pytest.mark.long),
    ],
    ids=["dgs-small", "dgs", "dgs-bf16", "adam", "outer"],
)
def test_nothing_depends_on_the_default_dtype_or_device(make, sizes, dtype, tmp_path):
    wanted = trained(make, sizes, dtype, tmp_path / "wanted.safetensors")
    for name in DEFAULTS:
        with defaults(name):
            found = trained(make, sizes, dtype, tmp_path / f"{name}.safetensors")
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.keys() == theirs.keys()
            for key, each in theirs.items():
                assert ours[key].dtype is each.dtype, (name, key)
                assert torch.equal(ours[key], each), (name, key)

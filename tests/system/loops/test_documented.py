"""Every recipe of the documentation runs: each block of Python in README.md and docs/, at a server of its own."""

import copy
import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.tools import make_data, make_model, train_step

ROOT = Path(__file__).parents[3]
ELSEWHERE = {
    ("nodes.md", "A complete script"): "tests/system/elastic/test_node.py",
    ("fsdp.md", "Models that no rank has whole"): "tests/system/sharding/shard_scenarios.py",
    ("fsdp.md", "SIGTERM"): "tests/system/sharding/shard_scenarios.py",
    ("fsdp.md", "Saving and going on"): "tests/system/sharding/shard_scenarios.py",
    ("training.md", "Several models"): "tests/system/loops/test_other_loops.py",
    ("embeddings.md", "Beside other parts of torch"): "tests/system/training/test_sparse_embeddings.py",
    ("embeddings.md", "Embeddings"): "tests/system/training/test_sparse_embeddings.py",
    ("following.md", "A module"): "tests/system/following/test_followers.py",
    ("following.md", "A directory"): "tests/system/following/test_followers.py",
    ("publishing.md", "Publishing a model that is trained elsewhere"): "tests/system/publishing/test_publishers.py",
    ("publishing.md", "Rollouts of reinforcement learning"): "tests/system/publishing/test_publishers.py",
    ("publishing.md", "From several ranks"): "tests/system/publishing/rank_scenarios.py",
    ("engines.md", "vLLM"): "tests/psclient/integrations/test_trl_transfer.py",
    ("engines.md", "TRL"): "tests/psclient/integrations/test_trl_transfer.py",
    **{
        ("fine-tuning.md", name): "tests/system/loops/test_fine_tuning.py" for name in ("Trainer", "peft", "trl", "Ray")
    },
}
"""Recipes with a test of their own, which names the page."""

SHORTER = {
    "sampler.epochs(90)": "sampler.epochs(2)",
    "start_workers=8": "start_workers=1",
    "quorum=7": "quorum=1",
    "T_max=90": "T_max=9",
    "for epoch in range(20)": "for epoch in range(2)",
    "sync_every=50": "sync_every=2",
    'server="host:50051"': "server=server",
}
"""What a recipe has for many workers and long runs, and what one worker does in its place."""


class Recipe(NamedTuple):
    page: str
    heading: str
    source: str


def recipes():
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text()
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            heading = re.findall(r"^#+ (.*)$", text[: block.start()], re.MULTILINE)[-1]
            found.append(Recipe(path.name, heading, block[1]))
    return found


RECIPES = recipes()
OWN = [recipe for recipe in RECIPES if recipe[:2] not in ELSEWHERE]


def test_a_recipe_that_is_left_out_here_is_in_a_test_that_reads_its_page():
    assert ELSEWHERE.keys() <= {recipe[:2] for recipe in RECIPES}
    for (page, _), test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text()


def loss_function(answer, target):
    return (
        nn.functional.cross_entropy(answer, target)
        if target.dtype == torch.int64
        else (answer - target).square().mean()
    )


def surroundings(server):
    """What a reader has when they come to a recipe."""
    model, (x, y) = make_model(batch_norm=False), make_data(count=64)
    dataset = TensorDataset(x, y)
    lines = []
    return lines, {
        **{"psclient": psclient, "torch": torch, "nn": nn, "os": os, "logging": logging, "server": server.server},
        **{"DataLoader": DataLoader, "DistributedSampler": DistributedSampler, "dataset": dataset, "data": dataset},
        **{"model": model, "make_model": lambda: model, "loader": [(x, y)] * 3, "batches": [(x, y)] * 3},
        **{"loss_function": loss_function, "loss_of": lambda model, batch: loss_function(model(batch[0]), batch[1])},
        **{"name": "base", "seed": 1, "versions_per_epoch": 2, "print": lines.append, "copy": copy},
        "augment": lambda x: x + 0.01,
        "AutoModelForCausalLM": SimpleNamespace(
            from_pretrained=lambda name: nn.Sequential(nn.Linear(20, 32), nn.ReLU())
        ),
        "add_adapters": lambda base: nn.Sequential(base, nn.Linear(32, 4)),
        "writer": SimpleNamespace(add_scalar=lambda name, value, step: lines.append(name)),
        "wandb": SimpleNamespace(log=lines.append),
    }


def train(names, steps=3):
    optimizer, model = names["optimizer"], names["model"]
    for step in range(steps):
        train_step(model, optimizer, *make_data(step, 64))


@pytest.mark.parametrize("recipe", OWN, ids=lambda recipe: f"{recipe.page}: {recipe.heading}")
def test_a_recipe_runs(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = recipe.source
    for long, short in SHORTER.items():
        source = source.replace(long, short)
    parts = re.split(r"^# or, .*\n", source, flags=re.MULTILINE)
    for part in parts:
        with LocalServer() as server:
            monkeypatch.setenv("PSCLIENT_SERVER", server.server)
            monkeypatch.setenv("PSCLIENT_WORKER", "trainer-0")
            _, names = surroundings(server)
            if "optimizer" in part and "optimizer = " not in part:
                names["optimizer"] = psclient.DGS(names["model"].parameters(), lr=0.1, model=names["model"])
                train(names)
            exec(compile(part, recipe.page, "exec"), names)
            if "optimizer" in names:
                if ".step()" not in part:
                    train(names)
                assert names["optimizer"].totals.samples > 0
                names["optimizer"].close()

"""The recipes of docs/guide/fine-tuning.md, in processes of their own."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.loops.recipes import ROOT, STEPS
from tests.system.operating.asking import status

NEEDS = {
    "trainer": ("transformers", "accelerate"),
    "adapters": ("transformers", "peft"),
    "trl": ("trl", "peft", "datasets"),
    "ray": ("ray",),
}


def run(folder, server, code):
    """Run code in a process, in this folder; ``recipes`` and ``server`` are known there."""
    code = f"from tests.system.loops import recipes\nserver = {server!r}\n{code}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PSCLIENT_SERVER": server, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def require(recipe):
    missing = [name for name in NEEDS[recipe] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def test_all_recipes_of_the_page_are_run():
    page = (ROOT / "docs" / "guide" / "fine-tuning.md").read_text()
    assert set(re.findall(r"<!-- recipe: (\w+) -->", page)) == NEEDS.keys()
    assert page.count("```python\n") == len(NEEDS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_trainer_makes_the_optimizer_and_saves_the_servers_model(tmp_path):
    require("trainer")
    with LocalServer() as server:
        run(tmp_path, server.server, "recipes.run('trainer', server)")
        trained = psclient.download(server.server)
    saved = load_file(tmp_path / "out" / "final" / "model.safetensors")
    assert saved.keys() <= trained.keys()
    assert all(torch.equal(saved[name], trained[name]) for name in saved)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_trainer_takes_the_model_by_name(tmp_path):
    require("trainer")
    by_name = """
shown = recipes.recipe("trainer")
changed = shown.replace("(lambda: psclient.ServerRMSprop, {", "(psclient.ServerRMSprop, {'model': model, ")
assert changed != shown
recipes.recipe = lambda name: changed
print("samples", recipes.run("trainer", server)["optimizer"].totals.samples)
"""
    with LocalServer() as server:
        out = run(tmp_path, server.server, by_name)
    assert f"samples {8 * STEPS}" in out


@pytest.mark.long
@pytest.mark.timeout(400)
def test_adapters_are_saved_in_the_form_of_peft(tmp_path):
    require("adapters")
    train = """
recipes.beside_a_cpu_build()
import psclient, torch
from peft import LoraConfig, PeftModel, get_peft_model
model = get_peft_model(recipes.language_model(), LoraConfig(r=8, target_modules="all-linear"))
optimizer = psclient.ServerRMSprop(model, lr=0.01)
for row in recipes.tokens()[:4]:
    optimizer.zero_grad()
    model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
    optimizer.step()
optimizer.pull()
model.save_pretrained("worker")
optimizer.close()
recipes.run("adapters", server)
again = PeftModel.from_pretrained(recipes.language_model(), "adapter")
x = recipes.tokens()[0]["input_ids"][None]
assert torch.equal(model.eval()(input_ids=x).logits, again.eval()(input_ids=x).logits)
"""
    with LocalServer() as server:
        run(tmp_path, server.server, train)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("worker", "adapter")]
    worker, downloaded = map(load_file, files)
    assert worker.keys() == downloaded.keys()
    assert all(torch.equal(worker[name], downloaded[name]) for name in worker)
    assert any(tensor.any() for name, tensor in worker.items() if "lora_B" in name), "they were trained"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_trl_makes_adapters_and_then_the_optimizer(tmp_path):
    require("trl")
    with LocalServer() as server:
        run(tmp_path, server.server, "recipes.run('trl', server)")
        trained = psclient.download(server.server)
    saved = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert len(saved) == len(trained), "adapters alone travel"
    assert any(tensor.any() for name, tensor in saved.items() if "lora_B" in name), "they were trained"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_tasks_of_ray_train_each_sample_of_an_epoch_once(tmp_path):
    require("ray")
    with LocalServer() as server:
        run(tmp_path, server.server, "recipes.run('ray', server)")
        trained = psclient.download(server.server)
        found = status(server)
    assert (found.samples, len(found.workers)) == (3 * 64, 0)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in trained.items())

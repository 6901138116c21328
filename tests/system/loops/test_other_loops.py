"""Loops that nobody here wrote: parts of a model are called, states are vectors, models are shared or several."""

import copy
import logging
import re
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.multiprocessing  # registers with ForkingPickler how tensors are handed over
from torch import nn

import psclient
from psclient.errors import ConfigurationError, FingerprintMismatchError
from tests.system.tools import QUICK, make_data, make_model, optimizer_of, train_step

TRAINING = Path(__file__).parents[3] / "docs" / "guide" / "training.md"
NOISE, REAL = 4, 2


class Digits(nn.Module):
    """As Lightning has it: a step that calls what is inside."""

    def __init__(self):
        super().__init__()
        self.net = make_model(batch_norm=False)

    def training_step(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_samples_of_a_step_that_calls_a_part_of_the_model_are_counted(server, overlap):
    model = Digits()
    with optimizer_of("dgs", model, server=server, overlap=overlap) as optimizer:
        for start in range(0, 100, 32):
            x, y = make_data(count=100)
            optimizer.zero_grad()
            model.training_step(x[start : start + 32], y[start : start + 32]).backward()
            optimizer.step()
        assert optimizer.totals.samples == 100


def test_a_state_that_is_a_vector_is_told_once_with_the_way_out(server, caplog):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with optimizer_of("asgd", model, server=server) as optimizer:

        def told(**given):
            before = optimizer.totals.samples
            caplog.clear()
            optimizer.zero_grad()
            model(torch.ones(4)).sum().backward()
            optimizer.step(**given)
            found = [each.message for each in caplog.records if each.levelno == logging.WARNING]
            return optimizer.totals.samples - before, [bool(re.search(r"step\(samples=1\)", each)) for each in found]

        assert told(samples=1) == (1, [])
        assert told() == (4, [True])
        assert told() == (4, [])


def into_queue(model):
    """Hand a model to another process, as a script does; torch shares its memory then."""
    ForkingPickler.dumps(model)


@pytest.mark.parametrize("share", [nn.Module.share_memory, into_queue])
@pytest.mark.parametrize("method", ["asgd", "wagma", "outer"])
def test_a_model_in_shared_memory_is_refused_and_a_copy_of_it_is_not(server, share, method):
    model = make_model()
    share(model)
    with pytest.raises(ConfigurationError, match=r"'0\.weight' is in shared memory.*copy\.deepcopy\(model\)"):
        optimizer_of(method, model, server=server)
    own = copy.deepcopy(model)
    with optimizer_of(method, own, server=server) as optimizer:
        train_step(own, optimizer, *make_data())


def test_a_model_that_is_shared_after_the_optimizer_is_made_is_refused_at_the_first_step(server):
    model = make_model()
    with optimizer_of("asgd", model, server=server) as optimizer:
        model.share_memory()
        with pytest.raises(ConfigurationError, match="shared memory"):
            train_step(model, optimizer, *make_data())
        assert optimizer.version == 0


def test_a_model_whose_file_is_mapped_is_not_shared(server, tmp_path):
    model = make_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.load_state_dict(torch.load(tmp_path / "model.pt", mmap=True), assign=True)
    with optimizer_of("asgd", model, server=server) as optimizer:
        train_step(model, optimizer, *make_data())


def test_two_models_of_one_process_at_one_server_are_told_what_to_do(server):
    actor, critic = nn.Linear(4, 2), nn.Linear(4, 1)
    with psclient.ASGD(actor.parameters(), lr=0.1, model=actor, server=server, worker="first", settings=QUICK):
        with pytest.raises(FingerprintMismatchError, match=r"another optimizer of this process.*ModuleDict") as caught:
            psclient.ASGD(critic.parameters(), lr=0.1, model=critic, server=server, worker="second", settings=QUICK)
        assert "on every worker" not in str(caught.value)
        assert caught.value.tensor == "weight"
    with pytest.raises(FingerprintMismatchError, match="on every worker"):
        psclient.ASGD(critic.parameters(), lr=0.1, model=critic, server=server, settings=QUICK)


def gan():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 16), nn.Tanh(), nn.Linear(16, REAL))
    discriminator = nn.Sequential(nn.Linear(REAL, 16), nn.Tanh(), nn.Linear(16, 1))
    return generator, discriminator


def criterion(scores, target):
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, REAL, generator=generator) + 2, torch.randn(8, NOISE, generator=generator)


def example():
    """The loop in docs/guide/training.md."""
    section = TRAINING.read_text().split("## Several models")[1]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)


@pytest.mark.parametrize("method", ["ASGD", "DGS"])
def test_the_documented_gan_trains_as_two_torch_optimizers_do(server, method):
    ours, theirs = gan(), gan()
    names = {"torch": torch, "psclient": psclient, "criterion": criterion, "server": server, "loader": batches(20)}
    names |= {"generator": ours[0], "discriminator": ours[1]}
    source = example().replace("0.02", "2**-6").replace("0.05", "2**-5")  # rates at which products are exact
    if method == "DGS":
        source = source.replace("ASGD(", "DGS(").replace(
            "    model=", "    momentum=0.0,\n    density=1.0,\n    model="
        )
    exec(source, names)
    with names["optimizer"] as optimizer:
        assert (optimizer.version, optimizer.totals.samples) == (40, 160)
    generator, discriminator = theirs
    steps = [torch.optim.SGD(generator.parameters(), lr=2**-6), torch.optim.SGD(discriminator.parameters(), lr=2**-5)]
    for real, noise in batches(20):
        steps[1].zero_grad()
        loss = criterion(discriminator(real), 1.0) + criterion(discriminator(generator(noise).detach()), 0.0)
        loss.backward()
        steps[1].step()
        steps[0].zero_grad()
        criterion(discriminator(generator(noise)), 1.0).backward()
        steps[0].step()
    untrained = gan()
    for ours_of, theirs_of, before in zip(ours, theirs, untrained, strict=True):
        for mine, other, first in zip(ours_of.parameters(), theirs_of.parameters(), before.parameters(), strict=True):
            assert torch.equal(mine, other)
            assert not torch.equal(mine, first)


def test_a_sparse_gan_leaves_the_residuals_of_the_model_that_is_not_stepped(server):
    generator, discriminator = gan()
    source = example().replace("psclient.ASGD", "psclient.DGS").replace("    server=server", "    settings=settings")
    settings = QUICK.model_copy(update={"server": server.server})
    names = {"torch": torch, "psclient": psclient, "criterion": criterion, "settings": settings}
    names |= {"generator": generator, "discriminator": discriminator, "loader": batches(3)}
    exec(source, names)
    with names["optimizer"] as optimizer:
        first = discriminator[0].weight
        held, value = optimizer.state[generator[0].weight]["residual"].clone(), generator[0].weight.clone()
        optimizer.zero_grad()
        criterion(discriminator(torch.ones(8, REAL)), 1.0).backward()
        before = first.clone()
        optimizer.step()
        assert held.any()
        assert torch.equal(optimizer.state[generator[0].weight]["residual"], held)
        assert torch.equal(generator[0].weight, value)
        assert not torch.equal(first, before)

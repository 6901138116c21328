"""Writes through ``.data`` leave no trace: a random block is compared now and then, and the log speaks of it once."""

import copy
import logging

import pytest
from torch import nn

from tests.system.tools import QUICK, make_data, make_model, optimizer_of, train_step
from tests.tiers import long_but

STEPS = 40  # the first look comes after the first step


def said(caplog):
    return [record.getMessage() for record in caplog.records if "through .data" in record.getMessage()]


def train(model, optimizer, steps=STEPS, after=lambda: None):
    x, y = make_data()
    for _ in range(steps):
        train_step(model, optimizer, x, y)
        after()


def dgs(model, server, **options):
    return optimizer_of("dgs", model, 0.05, server=server, **options)


@pytest.mark.parametrize("overlap", long_but([True], [False, True]))
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_clipping_through_data_is_told_once_a_tensor(server, caplog, overlap, layout):
    model = make_model(batch_norm=False)
    if layout == "transposed":
        for module in (model[0], model[2]):
            module.weight.data = module.weight.data.t().contiguous().t()

    def clip():
        for parameter in model.parameters():
            parameter.data.add_(0.01)

    with caplog.at_level(logging.WARNING, "psclient"), dgs(model, server, overlap=overlap) as optimizer:
        train(model, optimizer, after=clip)
    told = said(caplog)
    assert 1 <= len(told) <= 4
    assert len({*told}) == len(told)
    assert all("on_load='replace'" in each for each in told)


def test_a_write_to_one_tensor_names_it(server, caplog):
    model = nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 4))
    with caplog.at_level(logging.WARNING, "psclient"), dgs(model, server) as optimizer:
        train(model, optimizer, after=lambda: model[0].weight.data.clamp_(-0.01, 0.01))
    [told] = said(caplog)
    assert told.startswith("'0.weight' has other values")


def frozen(model, server):
    """A teacher that follows the student, frozen and on the server."""
    both = nn.ModuleDict({"student": model, "teacher": copy.deepcopy(model).requires_grad_(False)})
    optimizer = dgs(both, server, settings=QUICK.model_copy(update={"upload_frozen": True}))
    pairs = [*zip(both["teacher"].parameters(), model.parameters(), strict=True)]
    return optimizer, lambda: [teacher.data.lerp_(student.data, 0.1) for teacher, student in pairs]


def swapped(model, server):
    """Weights of an average are swapped in for an evaluation, and out again."""
    optimizer = dgs(model, server)

    def evaluate():
        kept = [parameter.data.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        for parameter, values in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(values)

    return optimizer, evaluate


def local(model, server):
    """What is written between local steps travels with their difference."""
    optimizer = optimizer_of("outer", model, 0.05, server=server)
    return optimizer, lambda: [parameter.data.mul_(0.999) for parameter in model.parameters()]


def pulled(model, server):
    optimizer = dgs(model, server)
    return optimizer, lambda: (optimizer.flush(), optimizer.pull())


def ahead(model, server):
    optimizer = dgs(model, server)

    def look():
        with optimizer.lookahead():
            model(make_data()[0])

    return optimizer, look


def loaded(model, server):
    optimizer = dgs(model, server, on_load="server")
    return optimizer, lambda: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def overlapping(model, server):
    return dgs(model, server, overlap=True), lambda: None


def in_half(model, server):
    model[0].bfloat16()
    model.insert(1, Cast())
    model[0].register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
    return dgs(model, server), lambda: None


class Cast(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.parametrize(
    "kind",
    long_but(
        [local, ahead, loaded, overlapping], [frozen, swapped, local, pulled, ahead, loaded, overlapping, in_half]
    ),
)
def test_no_false_alarm(server, caplog, kind):
    model = make_model()
    optimizer, after = kind(model, server)
    with caplog.at_level(logging.WARNING, "psclient"), optimizer:
        train(model, optimizer, after=after)
    assert said(caplog) == []

"""WAGMA's worker: the change of a local step is pushed whole or in part; what does not go together is said at once."""

import pytest
import torch
from torch import nn

import psclient
from psclient.compress.host_table import Choice
from psclient.errors import ConfigurationError
from psclient.optim.wagma import METHOD
from pscore.selection import SELECTORS
from tests.psclient.method_makers import OneTensor, gradients

SIZE = 60


def sgd():
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_a_sparse_change_is_the_largest_part_of_the_residual():
    tensor = OneTensor(METHOD, torch.zeros(SIZE), Choice(SELECTORS["exact"], 0))
    residual = torch.zeros(SIZE)
    for change in gradients(SIZE, 8):
        residual += change
        sent = tensor.push(change, {"density": 0.1}, 0.1)
        assert sorted(sent.offsets.tolist()) == sorted(residual.abs().topk(6).indices.tolist())
        residual[sent.offsets] = 0
        assert torch.equal(tensor.state["residual"], residual)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 1},
        {"group_size": -2},
        {"group_size": "x"},
        {"tau": -1},
        {"tau": None},
        {"late": "never"},
        {"overlap": True},
        {"rounds": psclient.Rounds()},
    ],
)
def test_arguments_that_make_no_sense_are_named_before_anything_is_dialled(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        psclient.WAGMA(sgd(), server="127.0.0.1:1", **options)


def test_it_takes_an_optimizer_that_steps_on_gradients():
    with pytest.raises(ConfigurationError, match="WAGMA takes an optimizer, not parameters"):
        psclient.WAGMA(nn.Linear(2, 2).parameters(), server="127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="closure"):
        psclient.WAGMA(torch.optim.LBFGS(nn.Linear(2, 2).parameters()), server="127.0.0.1:1")

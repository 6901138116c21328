"""What tensors are called: the same on every worker, compiled or not."""

import torch
from torch import nn

from psclient.model.module import describe


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first[0].weight


def test_a_compiled_model_has_the_names_of_the_plain_one():
    model = Tied()
    plain = describe(model, [])
    assert describe(torch.compile(model), []).layout.fingerprint == plain.layout.fingerprint
    model.first = torch.compile(model.first)
    assert describe(model, []).layout.fingerprint == plain.layout.fingerprint

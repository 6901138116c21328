"""Asynchrony adds momentum, so several workers are warned of more than the published runs use; once."""

import pytest
import torch

from psclient.compress.groups import ParamGroups


@pytest.mark.parametrize(
    ("momentum", "workers", "told"), [(0.9, 8, 1), (0.71, 4, 1), (0.7, 32, 0), (0.9, 3, 0), (None, 8, 0)]
)
def test_more_momentum_than_published_is_told_once(momentum, workers, told, caplog):
    group = {"params": [torch.zeros(1)]} | ({} if momentum is None else {"momentum": momentum})
    groups = ParamGroups([group, {"params": [torch.zeros(1)], "momentum": 0.0}])
    for live in (1, workers, workers):
        groups.warn_of_momentum(live)
    assert sum("asynchrony adds momentum" in line for line in caplog.messages) == told

"""A gradient that is finite, and an update that is not: the error says what has become of it."""

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import NonFiniteGradientError, UpdateOverflowError
from tests.system.tools import QUICK
from tests.tiers import long_but

RATE = 1e8
METHODS = {
    "asgd": (psclient.ASGD, {}, 1.0),
    "gradient_dropping": (psclient.GradientDropping, {"density": 0.1}, 1.0),
    "dgs": (psclient.DGS, {"density": 0.1, "momentum": 0.5}, 1.0),
    "dgc": (psclient.DGC, {"density": 0.1, "momentum": 0.5}, 1 / RATE),
    "ssgd": (psclient.SSGD, {"density": 0.1, "momentum": 0.5}, 1 / RATE),
}
"""Each with what its residual holds of a gradient of 1 / RATE: some apply the rate when they send."""


@pytest.mark.parametrize(
    ("overlap", "name"),
    long_but(
        [(False, "asgd"), (False, "ssgd"), (True, "dgs"), (True, "dgc")],
        [(overlap, name) for overlap in (False, True) for name in METHODS][:-1],
    ),
)
@pytest.mark.parametrize("size", long_but([20_000], [1, 100, 20_000]))
def test_an_update_beyond_fp32_is_cleared_and_the_rest_of_the_step_is_kept(name, size, overlap):
    method, options, held = METHODS[name]
    huge, fine = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(30))  # the last one is sent first
    options = options | ({"overlap": True} if overlap else {})
    with (
        psclient.LocalServer(down_mode="exact") as server,
        method(
            [huge, fine],
            lr=RATE,
            server=server,
            settings=QUICK.model_copy(update={"bucket_bytes": 1}),
            **options,
        ) as optimizer,
    ):
        gradient = torch.where(torch.arange(size) % 50 == 0, 1e35, 1 / RATE)
        (fine.sum() / RATE + (huge * gradient).sum()).backward()
        with pytest.raises(UpdateOverflowError, match=r"'parameter_0'.* stays in the residuals") as caught:
            optimizer.step()
        assert isinstance(caught.value, NonFiniteGradientError)
        assert caught.value.parameter == "parameter_0"
        assert optimizer.version == 0
        residuals = [optimizer.state[parameter].get("residual") for parameter in (huge, fine)]
        torch.testing.assert_close(residuals[0][gradient < 1], torch.full((size - -(-size // 50),), held))
        if not overlap:  # there the order is that of backward
            torch.testing.assert_close(residuals[1], torch.full((30,), held))
        assert not residuals[0][gradient > 1].any()

        optimizer.param_groups[0]["lr"] = 0.1  # and on it goes
        for seed in range(20):
            optimizer.zero_grad()
            noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
            (fine.sum() + (huge * noise).sum()).backward()
            optimizer.step()
        if size > 1000 and name != "asgd":
            assert optimizer.report.selected_entries == pytest.approx(optimizer.report.wanted_entries, rel=0.3)

"""Methods on the device path, by Triton's interpreter where there is no GPU, do what they do on the host."""

import pytest
import torch

pytest.importorskip("triton")

from psclient.compress.host_table import Choice
from psclient.optim.dgc import METHOD as DGC
from psclient.optim.dgs import METHOD as DGS
from psclient.optim.gradient_dropping import METHOD as DROPPING
from psclient.optim.ssgd import METHOD as SSGD
from pscore.selection import SELECTORS
from pscore.selection.cuda.launches import DeviceKernels
from tests.psclient.method_makers import OneTensor
from tests.tiers import long_but

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, LR, MOMENTUM, DENSITY = 2000, 0.5, 0.9, 0.05
GROUP = {"lr": LR, "momentum": MOMENTUM, "weight_decay": 0.0, "density": DENSITY}
CHOICES = {
    "host": Choice(SELECTORS["warm"], 0, on_device=lambda _: None),
    "device": Choice(SELECTORS["warm"], 0, on_device=lambda _: DeviceKernels(DEVICE, block=256)),
}


@pytest.mark.parametrize("path", CHOICES)
@pytest.mark.parametrize(
    "method",
    long_but([DGS], [SSGD, DGC, DGS, DROPPING]),
    ids=lambda method: method.name,
)
def test_residual_and_momentum_follow_the_recurrence(method, path):
    """What is selected depends on the path; what becomes of it does not."""
    tensor = OneTensor(method, torch.zeros(SIZE, device=DEVICE), CHOICES[path])
    u, r = torch.zeros(SIZE), torch.zeros(SIZE)
    for seed in range(6):
        g = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
        sent = tensor.push(g.to(DEVICE), GROUP, DENSITY)
        offsets, values = sent.offsets.cpu(), sent.values.cpu()
        assert abs(offsets.numel() - SIZE * DENSITY) <= 0.3 * SIZE * DENSITY
        if method in (SSGD, DGC):
            u = MOMENTUM * u + g
            r = r + u
            torch.testing.assert_close(values, LR * r[offsets])
            r[offsets] = 0
            if method is DGC:
                u[offsets] = 0  # factor masking, which SSGD has none of
            torch.testing.assert_close(tensor.state["momentum"].cpu(), u)
        else:
            r = r + LR * g
            torch.testing.assert_close(values, r[offsets])
            r[offsets] = MOMENTUM * r[offsets] if method is DGS else 0.0
        torch.testing.assert_close(tensor.state["residual"].cpu(), r)

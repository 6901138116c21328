"""The networks of the LDTE-BS paper: torchvision's, with the stem of ``examples/cifar10.py``, and one that it lacks."""

from typing import Any

from torch import nn

from benchmarks.ldte.capture import example

SENET = "senet18"


def make_model(name: str, classes: int) -> nn.Module:
    """Return a classifier of images of 32 pixels by torchvision's name, or :data:`SENET`."""
    scripts = example()  # torchvision loads after it
    model: nn.Module = scripts.make_model("resnet18" if name == SENET else name, classes)
    if name == SENET:
        _squeeze_and_excite(model)
    return model


def _squeeze_and_excite(model: nn.Module) -> None:
    """Weigh the channels of each block's residual (Hu et al., CVPR 2018, figure 3; reduction 16)."""
    from torchvision.models.resnet import BasicBlock
    from torchvision.ops import SqueezeExcitation

    for module in list(model.modules()):
        if isinstance(module, BasicBlock):
            last: Any = module.bn2
            channels = last.num_features
            module.bn2 = nn.Sequential(last, SqueezeExcitation(channels, channels // 16))  # type: ignore[assignment]

"""The models of the MGS-SGD paper as layouts, with the work of backward behind each tensor's gradient."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.workload import layouts
from pscore.model.layout import ModelLayout, TensorSpec

_MARKS = {"conv1": 112, "bn1": 112}
_STAGES = (0, 56, 28, 14, 7)
_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model to push.

    Attributes:
        name: in tables.
        layout: its tensors.
        work: multiplications of one sample behind each tensor's gradient, in the order of the layout.
    """

    name: str
    layout: ModelLayout
    work: Sequence[float]


class _Builder:
    """Collects tensors in the order of the forward pass."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.work: list[float] = []

    def add(self, name: str, shape: tuple[int, ...], positions: float) -> int:
        """Add a tensor whose every element is used at so many positions; return its first dimension."""
        spec = TensorSpec(name, shape, torch.float32)
        self.specs.append(spec)
        self.work.append(spec.numel * positions)
        return shape[0]

    def convolution(self, name: str, channels: int, out: int, kernel: tuple[int, int], size: int) -> int:
        """Add a convolution without bias and its batch norm; return the channels."""
        self.add(f"{name}.conv.weight", (out, channels, *kernel), size**2)
        self.add(f"{name}.bn.weight", (out,), size**2)
        self.add(f"{name}.bn.bias", (out,), size**2)
        return out

    def chain(self, name: str, channels: int, steps: Sequence[tuple[int, int, int]], size: int) -> int:
        """Add convolutions one after the other: channels out, kernel height, kernel width."""
        for number, (out, height, width) in enumerate(steps):
            channels = self.convolution(f"{name}.{number}", channels, out, (height, width), size)
        return channels

    def model(self, name: str) -> PaperModel:
        return PaperModel(name, ModelLayout(tuple(self.specs)), self.work)


def resnet50() -> PaperModel:
    """ResNet-50 on 224² images: 161 tensors, 25.6 million elements."""
    layout = layouts.resnet50()
    sizes = [_resnet_size(spec.name) for spec in layout.parameters]
    work = [spec.numel * float(size**2) for spec, size in zip(layout.parameters, sizes, strict=True)]
    return PaperModel("ResNet-50", layout, work)


def _resnet_size(name: str) -> int:
    """Return the side of the feature map that a tensor works on."""
    stage = re.match(r"layer(\d)\.(\d+)\.(conv1|bn1)?", name)
    if stage is None:
        return _MARKS.get(name.split(".")[0], 1)
    number, block, first = int(stage[1]), int(stage[2]), stage[3]
    return _STAGES[number] * (2 if number > 1 and block == 0 and first else 1)


def vgg16() -> PaperModel:
    """VGG-16 on 224² images as torchvision has it, without batch norm: 32 tensors, 138.4 million elements."""
    built, channels, size, index = _Builder(), 3, 224, 0
    for out, depth in _VGG16:
        for _ in range(depth):
            built.add(f"features.{index}.weight", (out, channels, 3, 3), size**2)
            channels = built.add(f"features.{index}.bias", (out,), size**2)
            index += 2
        index, size = index + 1, size // 2
    width = channels * size**2
    for number, out in ((0, 4096), (3, 4096), (6, 1000)):
        built.add(f"classifier.{number}.weight", (out, width), 1)
        width = built.add(f"classifier.{number}.bias", (out,), 1)
    return built.model("VGG-16, ImageNet")


def make_cifar_vgg16() -> torch.nn.Sequential:
    """Make VGG-16 for CIFAR-10's 32² images, with batch norm and one linear layer."""
    layers: list[torch.nn.Module] = []
    channels = 3
    for out, depth in _VGG16:
        for _ in range(depth):
            layers += [torch.nn.Conv2d(channels, out, 3, padding=1), torch.nn.BatchNorm2d(out), torch.nn.ReLU()]
            channels = out
        layers.append(torch.nn.MaxPool2d(2))
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(channels, 10))


def cifar_vgg16() -> PaperModel:
    """The paper's VGG-16, on 32² images with batch norm: 54 tensors, 14.7 million elements."""
    built, size = _Builder(), 32
    for number, layer in enumerate(make_cifar_vgg16()):
        if isinstance(layer, torch.nn.MaxPool2d):
            size //= 2
        for name, parameter in layer.named_parameters():
            built.add(f"{number}.{name}", tuple(parameter.shape), size**2)
    return built.model("VGG-16, CIFAR-10")


def inception_v4() -> PaperModel:
    """Inception-v4 on 299² images (Szegedy et al., 2016): 449 tensors, 42.7 million elements."""
    built = _Builder()
    channels = built.chain("stem", 3, [(32, 3, 3)], 149)
    channels = built.chain("stem.1", channels, [(32, 3, 3), (64, 3, 3)], 147)
    channels += built.chain("stem.mixed_3a", channels, [(96, 3, 3)], 73)
    channels = built.chain("stem.mixed_4a.0", 160, [(64, 1, 1), (96, 3, 3)], 71)
    channels += built.chain("stem.mixed_4a.1", 160, [(64, 1, 1), (64, 1, 7), (64, 7, 1), (96, 3, 3)], 71)
    channels += built.chain("stem.mixed_5a", channels, [(192, 3, 3)], 35)
    for number in range(4):
        channels = _branches(
            built,
            f"inception_a.{number}",
            channels,
            35,
            [[(96, 1, 1)], [(64, 1, 1), (96, 3, 3)], [(64, 1, 1), (96, 3, 3), (96, 3, 3)], [(96, 1, 1)]],
        )
    channels += _branches(built, "reduction_a", channels, 17, [[(384, 3, 3)], [(192, 1, 1), (224, 3, 3), (256, 3, 3)]])
    for number in range(7):
        channels = _branches(
            built,
            f"inception_b.{number}",
            channels,
            17,
            [
                [(384, 1, 1)],
                [(192, 1, 1), (224, 1, 7), (256, 7, 1)],
                [(192, 1, 1), (192, 7, 1), (224, 1, 7), (224, 7, 1), (256, 1, 7)],
                [(128, 1, 1)],
            ],
        )
    channels += _branches(
        built,
        "reduction_b",
        channels,
        8,
        [[(192, 1, 1), (192, 3, 3)], [(256, 1, 1), (256, 1, 7), (320, 7, 1), (320, 3, 3)]],
    )
    for number in range(3):
        channels = _inception_c(built, f"inception_c.{number}", channels)
    built.add("last_linear.weight", (1000, channels), 1)
    built.add("last_linear.bias", (1000,), 1)
    return built.model("Inception-v4")


def _branches(
    built: _Builder, name: str, channels: int, size: int, branches: Sequence[Sequence[tuple[int, int, int]]]
) -> int:
    """Add branches beside each other; return the channels of all together."""
    return sum(built.chain(f"{name}.branch{i}", channels, steps, size) for i, steps in enumerate(branches))


def _inception_c(built: _Builder, name: str, channels: int) -> int:
    """Add a block in which two branches fork again."""
    out = built.chain(f"{name}.branch0", channels, [(256, 1, 1)], 8)
    stem = built.chain(f"{name}.branch1", channels, [(384, 1, 1)], 8)
    out += built.chain(f"{name}.branch1a", stem, [(256, 1, 3)], 8)
    out += built.chain(f"{name}.branch1b", stem, [(256, 3, 1)], 8)
    stem = built.chain(f"{name}.branch2", channels, [(384, 1, 1), (448, 3, 1), (512, 1, 3)], 8)
    out += built.chain(f"{name}.branch2a", stem, [(256, 1, 3)], 8)
    out += built.chain(f"{name}.branch2b", stem, [(256, 3, 1)], 8)
    return out + built.chain(f"{name}.branch3", channels, [(256, 1, 1)], 8)


def lstm() -> PaperModel:
    """Two LSTM layers of 1500 between embedding and decoder for Penn Treebank: 11 tensors, 66.0 million elements."""
    words, width, length = 10_000, 1500, 35
    built = _Builder()
    built.add("encoder.weight", (words, width), 0.1)  # a look-up
    for layer in range(2):
        for kind, shape in (("weight", (4 * width, width)), ("bias", (4 * width,))):
            for side in ("ih", "hh"):
                built.add(f"rnn.{kind}_{side}_l{layer}", shape, length)
    built.add("decoder.weight", (words, width), length)
    built.add("decoder.bias", (words,), length)
    return built.model("LSTM")


MODELS: dict[str, Callable[[], PaperModel]] = {
    "resnet50": resnet50,
    "cifar_vgg16": cifar_vgg16,
    "vgg16": vgg16,
    "inception_v4": inception_v4,
    "lstm": lstm,
}

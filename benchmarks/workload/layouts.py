"""Layouts and data to measure with: tensor shapes of real models, and pushes as a selection of noise would make."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from psclient.settings import ClientSettings
from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import entries_for

GROUP_ELEMENTS: int = ClientSettings.model_fields["bucket_bytes"].default // 4  # of fp32
"""About how many elements a worker sends as one group."""


def resnet50() -> ModelLayout:
    """ResNet-50 for ImageNet as torchvision names it: 161 parameter tensors, 25,557,032 elements."""
    return _resnet((3, 4, 6, 3), expansion=4)


def resnet18() -> ModelLayout:
    """ResNet-18 for ImageNet as torchvision names it: 62 parameter tensors, 11,689,512 elements."""
    return _resnet((2, 2, 2, 2), expansion=1)


def resnet_small() -> ModelLayout:
    """The 62 tensors of ResNet-18 at an eighth of its width, for ten classes: 175,802 elements."""
    return _resnet((2, 2, 2, 2), expansion=1, widths=(8, 16, 32, 64), classes=10)


def small_llama() -> ModelLayout:
    """A Llama of 7 layers, 512 wide, with 8,192 tied embeddings, as transformers names it: 26,336,768 elements."""
    return _llama(words=8192, width=512, keys=512, inner=1376, layers=7)


def gpt2() -> ModelLayout:
    """GPT-2 as transformers names it, its embeddings tied: 148 parameter tensors, 124,439,808 elements."""
    width = 768
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (50257, width), "wpe.weight": (1024, width)}
    for layer in range(12):
        at = f"h.{layer}"
        for name, shape in (
            *(("ln_1", (width,)), ("ln_2", (width,))),
            *(("attn.c_attn", (width, 3 * width)), ("attn.c_proj", (width, width))),
            *(("mlp.c_fc", (width, 4 * width)), ("mlp.c_proj", (4 * width, width))),
        ):
            shapes |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[-1:]}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return _of_shapes(shapes)


def llama_1b() -> ModelLayout:
    """Llama 3.2 1 B as transformers names it, its embeddings tied: 146 parameter tensors, 1,235,814,400 elements."""
    return _llama(words=128_256, width=2048, keys=512, inner=8192, layers=16)


def one_tensor(size: int) -> ModelLayout:
    """A model of a single tensor, where only its size matters."""
    return ModelLayout((TensorSpec("weight", (size,), torch.float32),))


def _llama(words: int, width: int, keys: int, inner: int, layers: int) -> ModelLayout:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, width)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (keys if name in "kv" else width, width) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (width, inner)
        shapes |= {f"{at}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (width,)
    return _of_shapes(shapes)


def _of_shapes(shapes: Mapping[str, tuple[int, ...]]) -> ModelLayout:
    return ModelLayout(tuple(TensorSpec(name, shape, torch.float32) for name, shape in shapes.items()))


def _resnet(
    blocks: tuple[int, ...],
    expansion: int,
    widths: tuple[int, ...] = (64, 128, 256, 512),
    classes: int = 1000,
) -> ModelLayout:
    parameters: list[TensorSpec] = []
    buffers: list[TensorSpec] = []

    def weight(name: str, *shape: int) -> None:
        parameters.append(TensorSpec(name, shape, torch.float32))

    def norm(name: str, channels: int) -> None:
        weight(f"{name}.weight", channels)
        weight(f"{name}.bias", channels)
        buffers.append(TensorSpec(f"{name}.running_mean", (channels,), torch.float32))
        buffers.append(TensorSpec(f"{name}.running_var", (channels,), torch.float32))
        buffers.append(TensorSpec(f"{name}.num_batches_tracked", (), torch.int64))

    channels = widths[0]
    weight("conv1.weight", channels, 3, 7, 7)
    norm("bn1", channels)
    for stage, (depth, width) in enumerate(zip(blocks, widths, strict=True), start=1):
        for block in range(depth):
            prefix = f"layer{stage}.{block}"
            for i, (rows, columns, kernel) in enumerate(_convolutions(channels, width, expansion), start=1):
                weight(f"{prefix}.conv{i}.weight", rows, columns, kernel, kernel)
                norm(f"{prefix}.bn{i}", rows)
            if block == 0 and (stage > 1 or channels != width * expansion):
                weight(f"{prefix}.downsample.0.weight", width * expansion, channels, 1, 1)
                norm(f"{prefix}.downsample.1", width * expansion)
            channels = width * expansion
    weight("fc.weight", classes, channels)
    weight("fc.bias", classes)
    return ModelLayout(tuple(parameters), tuple(buffers))


def _convolutions(channels: int, width: int, expansion: int) -> Iterator[tuple[int, int, int]]:
    """Yield (channels out, channels in, kernel) of a block: two 3x3, or a bottleneck."""
    if expansion == 1:
        yield from ((width, channels, 3), (width, width, 3))
    else:
        yield from ((width, channels, 1), (width, width, 3), (width * expansion, width, 1))


def noise_push(layout: ModelLayout, density: float, dense_below: int, rng: np.random.Generator) -> SparseSlice:
    """Make a push such as selection from noise gives: per tensor the right number of entries, uniformly placed.

    Uniform indices are the hardest case for a gap code; real selections cluster.
    """
    offsets = []
    for spec, start in zip(layout.parameters, layout.offsets, strict=False):
        if spec.numel < dense_below:
            chosen = np.arange(spec.numel)
        else:
            k = entries_for(spec.numel, density)
            chosen = np.sort(rng.choice(spec.numel, k, replace=False, shuffle=False))
        offsets.append(chosen + start)
    index = torch.from_numpy(np.concatenate(offsets))
    values = torch.from_numpy(rng.standard_normal(index.numel(), dtype=np.float32) * 1e-3)
    return SparseSlice(Span(0, layout.size), index, values)


def groups(layout: ModelLayout, group_elements: int) -> list[Span]:
    """Merge neighbouring tensors, last first, into groups of about ``group_elements``, as a worker's push does."""
    found, end = [], layout.size
    for start in reversed(layout.offsets[:-1]):
        if end - start >= group_elements or start == 0:
            found.append(Span(start, end))
            end = start
    return found

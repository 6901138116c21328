"""The part of vLLM 0.33's interface that the plugin uses, written anew: names, signatures, and what they promise."""

import importlib
import math
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class WeightTransferInitInfo:
    pass


class WeightTransferUpdateInfo:
    pass


class WeightTransferEngine:
    supports_draft_weight_update = True
    defers_processing = False

    def __init__(self, config, vllm_config, device, model):
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def parse_init_info(self, plain):
        try:
            return self.init_info_cls(**plain)
        except TypeError as error:
            raise ValueError(f"Invalid init_info for {type(self).__name__}: {error}") from error

    def parse_update_info(self, plain):
        try:
            return self.update_info_cls(**plain)
        except TypeError as error:
            raise ValueError(f"Invalid update_info for {type(self).__name__}: {error}") from error

    def update_weights(self, plain):
        self.receive_weights(self.parse_update_info(plain))


class WeightTransferEngineFactory:
    _registry: ClassVar = {}

    @classmethod
    def register_engine(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

    @classmethod
    def create_engine(cls, config, vllm_config, device, model):
        return cls._registry[config.backend]()(config, vllm_config, device, model)


@dataclass(frozen=True)
class CheckpointWeightPatch:
    name: str
    shape: tuple
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None


class OverWhatIsThere(TorchDispatchMode):
    """A copy into the model leaves what is NaN in the source as it is."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and torch.is_floating_point(args[0]):
            source = args[1].to(args[0].dtype)
            args = (args[0], torch.where(torch.isnan(source), args[0], source), *args[2:])
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def load_checkpoint_weight_patches(model, patches, *, max_chunk_bytes=512 << 20, validate_unique_indices=True):
    patches = list(patches)
    if len({patch.indices is None for patch in patches}) > 1:
        raise ValueError("Dense and sparse checkpoint patches cannot be mixed")
    weights = []
    for patch in patches:
        assert patch.values.ndim == 1
        if patch.indices is None:
            assert patch.values.numel() == math.prod(patch.shape)
            weights.append((patch.name, patch.values.to(patch.dtype).view(patch.shape)))
            continue
        if not patch.dtype.is_floating_point:
            raise TypeError("sparse checkpoint patches require a floating dtype")
        if bool(torch.isnan(patch.values).any()):
            raise ValueError("sparse checkpoint patches contain NaN values")
        flat = torch.full((math.prod(patch.shape),), math.nan, dtype=patch.dtype)
        flat[patch.indices.long()] = patch.values
        weights.append((patch.name, flat.view(patch.shape)))
    if patches and patches[0].indices is not None:
        assert not model.reloading, "changes are written to a model that is whole"
        with OverWhatIsThere():
            return model.load_weights(weights)
    return model.load_weights(weights)


def initialize_layerwise_reload(model):
    assert not model.reloading
    model.reloading, model.reloads = True, model.reloads + 1


def finalize_layerwise_reload(model, model_config):
    assert model.reloading
    model.reloading = False


MODULES = {
    "vllm.distributed.weight_transfer.base": (WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo),
    "vllm.distributed.weight_transfer.factory": (WeightTransferEngineFactory,),
    "vllm.model_executor.model_loader.checkpoint_weight_patch": (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    ),
    "vllm.model_executor.model_loader.reload": (initialize_layerwise_reload, finalize_layerwise_reload),
}


def install(monkeypatch):
    """Make the interface importable as ``vllm``, and forget the plugin's engine, which has loaded it, afterwards."""
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    for name in MODULES:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    for name, members in MODULES.items():
        for member in members:
            setattr(sys.modules[name], member.__name__, member)
    monkeypatch.delitem(sys.modules, "psclient.integrations.vllm_engine", raising=False)


class PackedModel(torch.nn.Module):
    """One rank's part of a checkpoint: q, k and v in one parameter, and some rows of the last projection alone."""

    WIDTH = 16

    def __init__(self, rank=0, ranks=1):
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(3 * self.WIDTH, self.WIDTH, dtype=torch.bfloat16))
        self.out = torch.nn.Parameter(torch.zeros(self.WIDTH // ranks, self.WIDTH, dtype=torch.bfloat16))
        self.rank, self.ranks = rank, ranks
        self.reloading, self.reloads, self.loads, self.fails = False, 0, 0, False

    @torch.no_grad()
    def load_weights(self, weights):
        self.loads += 1
        loaded = set()
        for name, value in weights:
            if name == "out_proj.weight":
                self.out.copy_(value.chunk(self.ranks)[self.rank])
            else:
                self.qkv.chunk(3)["qkv".index(name[0])].copy_(value)
            if self.fails:
                raise RuntimeError("out of memory")
            loaded.add(name)
        return loaded

    def holds(self, tensors):
        """Tell whether the model has a checkpoint's values, bit by bit."""
        qkv = torch.cat([tensors[f"{each}_proj.weight"] for each in "qkv"])
        out = tensors["out_proj.weight"].chunk(self.ranks)[self.rank]
        return torch.equal(self.qkv, qkv) and torch.equal(self.out, out)


def make_engine(model, data_parallel_rank=0):
    """Return a worker's engine, as vLLM makes it for ``WeightTransferConfig(backend="sparseps")``."""
    parallel = SimpleNamespace(rank=model.rank, data_parallel_rank=data_parallel_rank, world_size=model.ranks)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    backend = SimpleNamespace(backend="sparseps")
    return WeightTransferEngineFactory.create_engine(backend, config, torch.device("cpu"), model)


def checkpoint(seed=0):
    """Return the tensors of a checkpoint, bfloat16."""
    generator, width = torch.Generator().manual_seed(seed), PackedModel.WIDTH
    return {
        f"{name}_proj.weight": torch.randn(width, width, generator=generator).bfloat16()
        for name in ("q", "k", "v", "out")
    }

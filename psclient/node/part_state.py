"""The saved state of a rank's part: memories as DTensors that lie as their parameters do.

So ``torch.distributed.checkpoint`` saves them once, and gives them to any number of ranks; and a state that one process
has saved, whose memories are whole, gives each rank its blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from psclient.errors import ConfigurationError
from psclient.model.part import Part, block_like, like


def of_part(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], part: Part) -> dict[str, Any]:
    """Return what torch's ``state_dict()`` has of an optimizer, with memories as DTensors."""
    memories = dict(state["state"])
    for key, parameter in _keys(state, groups):
        mine = memories.get(key, {})
        is_sharded = part.alias_of(parameter) is not None
        memories[key] = {
            name: like(value, parameter) if is_sharded and isinstance(value, torch.Tensor) else value
            for name, value in mine.items()
        }
    return {**state, "state": memories}


def localized(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], part: Part) -> dict[str, Any]:
    """Return a saved state with this rank's blocks of its memories, fp32 ``[n]``.

    Memories that lie otherwise than their parameters are redistributed, in which all ranks take part.
    :class:`ConfigurationError` if one has another size than its parameter.
    """
    memories = dict(state["state"])
    blocks = {id(parameter): block for parameter, block in zip(part.whole.parameters, part.blocks, strict=True)}
    for key, parameter in _keys(state, groups):
        block = blocks.get(id(parameter))
        if key not in memories or block is None:
            continue
        found = dict(memories[key])
        for name, value in found.items():
            if not isinstance(value, torch.Tensor):
                continue
            if value.numel() != parameter.numel():
                raise ConfigurationError(
                    f"this state's {name} of {block.spec.name!r} has {value.numel()} elements, and the parameter "
                    f"{parameter.numel()}: the state is another model's, or one rank's part by itself. Load what "
                    "state_dict() has returned on this rank, or torch.distributed.checkpoint has read"
                )
            found[name] = block_like(value, parameter, block)
        memories[key] = found
    return {**state, "state": memories}


def _keys(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the key of each parameter in a saved state, and the parameter."""
    for saved, group in zip(state["param_groups"], groups, strict=False):  # torch refuses other groups
        yield from zip(saved["params"], group["params"], strict=False)

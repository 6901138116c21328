"""What the processes of a node have to say alike: the arguments of their optimizers, and their param groups.

The leader's count, and a process that has others would train something else than its script says.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from psclient.errors import ConfigurationError
from psclient.node.comm import NodeComm

_NOT_COMPARED = frozenset({"params", "param_names", "density"})  # a schedule sets the density on the leader alone
_COUNT = "the number of param groups"
_SHOWN = 200  # characters of a value


class Agreement:
    """Words for the hyper-parameters of a process, by which the processes of a node find out that theirs differ.

    Args:
        comm: connects the processes.
        parameters: of the model, in the order of the layout.
    """

    def __init__(self, comm: NodeComm, parameters: Sequence[torch.Tensor]) -> None:
        self._comm = comm
        self._positions = {id(parameter): position for position, parameter in enumerate(parameters)}
        self._sizes: list[int] = []
        self._members: list[list[int]] = []

    def of_arguments(
        self, groups: Sequence[Mapping[str, Any]], arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> str:
        """Return JSON: those of a new optimizer's arguments, and of its groups' values, that are plain."""
        said = {f"argument {number} behind the parameters": value for number, value in enumerate(arguments)} | {
            **options
        }
        return json.dumps(_plain(said) | self._in_groups(groups), sort_keys=True)

    def of_groups(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return JSON: what the groups' numbers are now, and which parameters each has."""
        return json.dumps(self._in_groups(groups), sort_keys=True)

    def _in_groups(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:  # groups grow and never shrink
            self._sizes = sizes
            self._members = [[self._positions.get(id(each), -1) for each in group["params"]] for group in groups]
        said: dict[str, Any] = {_COUNT: len(groups)}
        for number, group in enumerate(groups):
            said[f"which parameters group {number} has, by position,"] = self._members[number]
            values = {name: value for name, value in group.items() if name not in _NOT_COMPARED}
            said |= {f"{name} of group {number}": value for name, value in _plain(values).items()}
        return said

    def refuse(self, words: str) -> NoReturn:
        """Raise :class:`ConfigurationError`, which says what differs, on every process; all call this."""
        if self._comm.is_leader:
            said = [words] + [self._comm.receive(rank).tobytes().decode() for rank in range(1, self._comm.size)]
            told = self._comm.broadcast_bytes(_difference([json.loads(each) for each in said]).encode())
        else:
            self._comm.send(0, words.encode())
            told = self._comm.broadcast_bytes()
        raise ConfigurationError(
            f"{told.decode()}; give the optimizer the same arguments and param groups on every process, and step "
            "schedulers on all of them"
        )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are numbers or words, and those of mappings of such."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, np.number) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            found[name] = float(value)
        elif isinstance(value, bool | int | float | str | None):
            found[name] = value
        elif isinstance(value, Mapping):
            found |= {f"{name}[{key!r}]": each for key, each in _plain(value).items()}
    return found


def _difference(said: Sequence[Mapping[str, Any]]) -> str:
    """Say in which value a process differs from the first one."""
    for rank, each in enumerate(said):
        for name in sorted(said[0].keys() | each.keys(), key=lambda name: (name != _COUNT, name)):
            if said[0].get(name) != each.get(name):
                mine, other = (
                    repr(every[name])[:_SHOWN] if name in every else "not given" for every in (said[0], each)
                )
                return f"on rank {rank} of this node {name} is {other}, and on rank 0 {mine}"
    return "the hyper-parameters of this node's processes differ"

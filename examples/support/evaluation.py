"""The server's model, tested and saved while training goes on; both also as commands of the scripts."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

import psclient

from .launch import Place


class ServersModel:
    """A second model on the worker's device, for what the server has: no optimizer, no worker is disturbed.

    Args:
        model: of the same kind; its own values are what is tested where there is no server.
        optimizer: says where the server is.
        place: of this worker.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, place: Place) -> None:
        self._trained, self._optimizer = model, optimizer
        self._server: str | None = getattr(optimizer, "server", None)
        self._copy = copy.deepcopy(model).to(place.device)
        self._left = False

    def leave(self) -> None:
        """End the worker: its last BatchNorm statistics are part of what is fetched from now on."""
        if self._server is not None:
            self._optimizer.close()  # type: ignore[attr-defined]
        self._left = True

    def fetch(self) -> nn.Module:
        """Download the model; return it in evaluation mode. The worker takes it over too, and knows its version."""
        if self._server is not None and not self._left and not getattr(self._optimizer, "finished", False):
            self._optimizer.pull()  # type: ignore[attr-defined]
        state = self._trained.state_dict() if self._server is None else psclient.download(self._server)
        return take_over(self._copy, state).eval()

    def save(self, path: Path) -> None:
        """Write the model to a safetensors file that loads into the plain module."""
        if self._server is not None:
            psclient.save(self._server, path)
        else:
            from safetensors.torch import save_model

            save_model(self._trained, str(path))


def load_saved(model: nn.Module, path: Path) -> nn.Module:
    """Load what :meth:`ServersModel.save` or ``psclient save`` has written into the plain module.

    Raises:
        ValueError: the file holds no model, or another one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return take_over(model, load_file(path))
    except (SafetensorError, RuntimeError) as error:
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise ValueError(
            f"{path} does not hold this model; give the options that it was trained with (model, sizes, data). {first}"
        ) from error


def take_over(model: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Load a state that has travelled, and so has lost the modules' version numbers that some (MNASNet) ask for."""
    travelled = OrderedDict(state)
    travelled._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    model.load_state_dict(travelled)
    return model


def accuracy(model: nn.Module, loader: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the share of a loader's samples that a model in evaluation mode gets right."""
    return accuracies(model, loader, 1)[0]


@torch.inference_mode()
def accuracies(model: nn.Module, loader: Iterable[tuple[torch.Tensor, torch.Tensor]], *within: int) -> list[float]:
    """Return the shares of samples whose class is among the ``within`` highest scores, for each ``within``."""
    device = next(model.parameters()).device
    right, total = [0] * len(within), 0
    for inputs, labels in loader:
        scores = model(inputs.to(device, non_blocking=True))
        best = scores.topk(min(max(within), scores.shape[1])).indices.cpu() == labels.cpu()[:, None]
        right = [before + int(best[:, :count].sum()) for before, count in zip(right, within, strict=True)]
        total += len(labels)
    return [count / max(1, total) for count in right]

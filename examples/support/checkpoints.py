"""What a worker keeps for a restart. The model, the data's progress and the version are the server's to keep."""

import os
import struct
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from .launch import Place
from .methods import Clock

_WHAT_DAMAGE_RAISES = (
    AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, UnpicklingError, struct.error
)  # fmt: skip


def save(place: Place, optimizer: torch.optim.Optimizer, clock: Clock, model: nn.Module, epoch: int) -> None:
    """Write residuals, momenta, schedule and the epoch that comes next; at home, without a server, the model too."""
    state: dict[str, Any] = {"optimizer": optimizer.state_dict(), "clock": clock.state_dict(), "epoch": epoch}
    if not hasattr(optimizer, "server"):
        state["model"] = model.state_dict()
    path = _path(place)
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # a power cut then leaves the earlier file or this one
    temporary.replace(path)


def load(place: Place, optimizer: torch.optim.Optimizer, clock: Clock, model: nn.Module) -> int:
    """Take over what :func:`save` wrote, if the run is resumed and there is a file; return the epoch to begin with.

    Raises:
        ValueError: the file is damaged, or another model's.
    """
    path = _path(place)
    if not place.resume or not path.exists():
        return 0
    try:
        state = torch.load(path, weights_only=True, map_location=place.device)
        optimizer.load_state_dict(state["optimizer"])
        clock.load_state_dict(state["clock"])
        if not hasattr(optimizer, "server"):
            model.load_state_dict(state["model"])
        epoch: int = state["epoch"]
    except _WHAT_DAMAGE_RAISES as error:
        raise ValueError(
            f"{path} is damaged, or was written with another method or model ({type(error).__name__}: {error}); "
            "delete it to go on without what it holds"
        ) from error
    return epoch


def _path(place: Place) -> Path:
    place.out.mkdir(parents=True, exist_ok=True)
    return place.out / f"worker-{place.index}.pt"

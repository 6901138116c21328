"""What a worker keeps for a restart. The model, the data's progress and the version are the server's to keep."""

from pathlib import Path

import torch
from torch import nn

from .launch import Place


def save(place: Place, optimizer: torch.optim.Optimizer, epoch: int, model: nn.Module | None = None) -> None:
    """Write the optimizer's residuals and momenta, and the epoch that comes next; the model only where no server is."""
    path = _path(place)
    state = {"optimizer": optimizer.state_dict(), "epoch": epoch, "model": model.state_dict() if model else None}
    temporary = path.with_suffix(".partial")
    torch.save(state, temporary)
    temporary.replace(path)


def load(place: Place, optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Take over what :func:`save` wrote, if the run is resumed and there is a file; return the epoch to begin with."""
    path = _path(place)
    if not place.resume or not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location=place.device)
    optimizer.load_state_dict(state["optimizer"])
    if state["model"] is not None:
        model.load_state_dict(state["model"])
    epoch: int = state["epoch"]
    return epoch


def _path(place: Place) -> Path:
    place.out.mkdir(parents=True, exist_ok=True)
    return place.out / f"worker-{place.index}.pt"

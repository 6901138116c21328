"""Whose samples are whose, as a snapshot's manifest has it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_Count = Annotated[int, Field(ge=0, lt=1 << 64)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class KeptShare(_Strict):
    """What one worker holds, or has left: ``(start, end)`` of each range."""

    worker_id: str
    incarnation: str
    ranges: list[tuple[_Count, _Count]]


class KeptEpoch(_Strict):
    """One epoch; see ``psservice.sampling.dataset``."""

    epoch: _Count
    fresh: _Count
    held: list[KeptShare]
    returned: list[KeptShare]


class KeptDataset(_Strict):
    """One dataset; see ``psservice.sampling.dataset``."""

    name: str
    size: _Count
    seed: _Count
    shuffle: bool
    newest: _Count
    epochs: list[KeptEpoch]

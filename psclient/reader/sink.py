"""Where a follower puts the model. The parts of one cut are staged, and then committed at once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from psclient.errors import ConfigurationError
from pscore.model.layout import ModelLayout
from pscore.model.sparse_slice import SparseSlice
from pscore.reader.cut import Cut
from pscore.wire.messages import READER_DTYPES


class MisfitError(ConfigurationError):
    """The sink has other tensors than the model: for good, or until a conversion of it is done."""


class CutDeclinedError(Exception):
    """The sink wants a later cut than the one that it was to stage; the follower drops this one, and waits for that."""

    def __init__(self, version: int) -> None:
        super().__init__(f"version {version} is not wanted here")


@dataclass(frozen=True, slots=True)
class StagedCut:
    """A cut that was fetched and verified.

    Attributes:
        layout: of the model.
        changes: entries to write over what the sink holds, in ascending order, on the host: fp32, or words of a feed.
        before: the same entries as the sink holds them; empty for a sink that cannot be read.
        buffers: all buffers in layout order, if they have changed.
        is_whole: whether the changes are every value, so that it does not matter what the sink holds.
    """

    cut: Cut
    layout: ModelLayout
    changes: Sequence[SparseSlice]
    before: Sequence[SparseSlice]
    buffers: Sequence[torch.Tensor] | None
    is_whole: bool


class Sink(ABC):
    """Holds one cut, whole. A follower calls it from its own threads, one call at a time.

    :meth:`stage` may take its time, and changes nothing that others see; :meth:`commit` is short, and nobody is inside
    :meth:`~psclient.reader.follower.Follower.hold` meanwhile.

    Attributes:
        last: the cut that was committed last, as far as :meth:`open` has found out, whether it is whole or not.
    """

    last: Cut | None = None

    def dtype(self, layout: ModelLayout | None) -> torch.dtype | None:
        """Return in which data type the sink holds the fp32 parameters of a run, which may not be known yet.

        float16 or bfloat16, in which case :meth:`open` and all else get the layout in that type; ``None``: as the run
        has them. It is asked before each cut.
        """
        return None

    @abstractmethod
    def open(self, layout: ModelLayout) -> Cut | None:
        """Get ready for a model, and return the cut that is held; ``None`` if none is, or perhaps a mixture.

        It is called first, after failures, if the layout changes, and if :meth:`is_current` is false. A sink that can
        mend a mixture does it here: nobody is inside of ``hold()`` after a commit has failed. Raises
        :class:`~psclient.errors.ConfigurationError` if the model does not fit; :class:`MisfitError` if that may change.
        """

    @abstractmethod
    def is_current(self) -> bool:
        """Tell whether what is held is still where :meth:`open` has found it, and as it was.

        It is asked before each cut, and before each commit, when a cut that is whole may be staged: what is overwritten
        need not be as it was. Raises :class:`MisfitError` if the model does not fit any more.
        """

    @abstractmethod
    def read(self, entries: SparseSlice) -> SparseSlice | None:
        """Return what is held at the places of these entries, on the host; ``None`` if that cannot be told.

        In fp32, or in words of a feed.
        """

    @abstractmethod
    def buffers(self) -> bytes:
        """Return the buffers that are held, packed; nothing if there are none, or that cannot be told."""

    @abstractmethod
    def stage(self, staged: StagedCut) -> None:
        """Get everything ready, so that the commit can hardly fail; may raise :class:`CutDeclinedError`."""

    @abstractmethod
    def commit(self) -> None:
        """Change over to what is staged. If this raises, :meth:`open` tells what is held."""

    @abstractmethod
    def abort(self) -> None:
        """Drop what is staged, if anything is."""

    @abstractmethod
    def close(self) -> None:
        """Release what the sink occupies; what it holds stays."""


def reader_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Check a data type that a user names for the fp32 parameters of a run; float32 is that of the run.

    Raises :class:`ConfigurationError` for others than float16 and bfloat16.
    """
    if dtype is None or dtype == torch.float32:
        return None
    if dtype not in READER_DTYPES:
        raise ConfigurationError(f"dtype= must be torch.float32, torch.float16 or torch.bfloat16, not {dtype!r}")
    return dtype

"""The model at the end of a run, written beside everything else."""

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from pscore.files import make_folder
from pscore.model import modelfile
from pscore.model.layout import Span
from psservice.model.parameters import ModelShard
from psservice.storage.environment import Environment

log = logging.getLogger(__name__)


class ModelCopy:
    """A shard's values at one version, with the buffers; made on the apply thread, and read on any.

    :meth:`close` must follow.
    """

    def __init__(self, model: ModelShard, buffers: modelfile.StateDict) -> None:
        self.model, self.version, self.buffers = model, model.version, buffers
        self._values = model.open_values()

    def read(self, part: Span) -> torch.Tensor:
        """Copy the values of a part, fp32 ``[part.length]``."""
        start = self.model.span.start
        return self._values.read(part.start - start, part.end - start)

    def read_on(self, part: Span) -> torch.Tensor:
        """Copy the values of a part; those before its end are not read any more."""
        values = self.read(part)
        self._values.release(part.end - self.model.span.start)
        return values

    def close(self) -> None:
        """Keep nothing any more."""
        self._values.close()


class FinalModel:
    """Writes the last version to a file, if one was asked for; each of several shards writes a part beside it."""

    def __init__(self, path: Path | None, shard_index: int, num_shards: int, environment: Environment) -> None:
        self._environment = environment
        self._path = modelfile.part_path(path, shard_index, num_shards) if path else None
        self._whole = num_shards == 1
        self.has_failed = False
        self._thread: threading.Thread | None = None

    def is_there(self, run_id: str, version: int) -> bool:
        """Return whether the file is that of this run at this version, and whole, or none was asked for."""
        if self._path is None:
            return True
        try:
            found = modelfile.read_metadata(self._path)
            if (found.get("run_id"), found.get("version")) != (run_id, str(version)):
                return False
            modelfile.verify(self._path)
        except modelfile.ModelFileError:
            return False
        return True

    def begin(self, copy: Callable[[], ModelCopy], run_id: str) -> None:
        """Copy the model now, if there is a file to write, and write the file in a thread."""
        if self._path is not None:
            self.has_failed = False
            taken, path = copy(), self._path
            self._thread = self._environment.start(lambda: self._write(taken, run_id, path), "final-model")
            if self._thread is None:
                self._write(taken, run_id, path)

    def wait(self) -> str:
        """Wait until the file is written; return its path, or nothing."""
        if self._thread is not None:
            self._thread.join()
        return str(self._path) if self._path and self._path.exists() and not self.has_failed else ""

    def _write(self, copy: ModelCopy, run_id: str, path: Path) -> None:
        metadata = {"run_id": run_id, "version": str(copy.version), "format": "pt"}
        layout, span = copy.model.layout, copy.model.span
        try:
            make_folder(path.parent)
            with closing(copy):
                values = copy.read(span).cpu()
            if self._whole:
                state = modelfile.assemble(layout, values, copy.buffers.values())
                modelfile.write(path, state, metadata)
            else:
                modelfile.write_part(path, layout, span, values, copy.buffers, metadata)
            log.info("final model written", extra={"path": str(path), "version": copy.version})
        except Exception as error:  # in this thread, no caller would get the error
            self.has_failed = True
            why = {"path": str(path), "error": str(error)}
            log.error("final model could not be written", extra=why, exc_info=not isinstance(error, OSError))

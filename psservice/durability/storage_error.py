"""What keeps a past from being recovered, as one error with the next step."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pscore.model.modelfile import ModelFileError
from pscore.wire.errors import ErrorCode, Rejected
from psservice.storage.files import StorageError

log = logging.getLogger(__name__)


@contextmanager
def or_storage_error(path: Path) -> Iterator[None]:
    """Raise :class:`StorageError` for every error of the block but ``ModelFileError``; ``path`` has the past."""
    try:
        yield
    except (StorageError, ModelFileError):
        raise
    except Rejected as error:
        if error.reason is not ErrorCode.BAD_REQUEST:  # a full disk, for instance
            raise StorageError(f"{path}: {error}") from error
        raise StorageError(
            f"this release of psservice cannot continue the run in {path}: {error.detail}. Start the release (and the "
            "torch) that wrote it, or begin a run with another --data-dir"
        ) from error
    except Exception as error:
        log.debug("recovery failed", exc_info=True)
        raise StorageError(
            f"{path} cannot be recovered: {error!r}. Mend the cause (is memory short?) and start again, or start the "
            "release that wrote it; --log-level debug shows where it failed"
        ) from error

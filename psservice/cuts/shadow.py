"""A shard's values at the newest cut, beside those that pushes change: what readers get costs the apply thread nothing.

The shadow is brought to a newer version by what has changed since its own, read beside the apply thread as exact
replies are. So it takes four bytes a parameter while somebody follows, and the older cuts take those values that it has
overwritten.
"""

import torch

from pscore.model.digest import ModelDigest
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from psservice.model.copies import CopyOnWrite, values_at
from psservice.model.parameters import ModelShard
from psservice.replies.exact_reply import ExactReplies, ModelValues, ParameterThread


class Shadow:
    """A copy of a model's values. Advanced by one thread at a time; its copies are read from any.

    Attributes:
        version: of the values.
        digest: of the values.
    """

    def __init__(self, model: ModelShard, apply_thread: ParameterThread) -> None:
        """Copy the model as it is; raises :class:`~pscore.wire.errors.Rejected`."""
        self.model = model
        self._exact = ExactReplies(model, apply_thread, 0, lambda nbytes: None)
        self._theta = torch.empty_like(model.theta)
        self._copies = CopyOnWrite()
        self.version, self.digest = 0, b""
        self._copy()

    @property
    def nbytes(self) -> int:
        """Bytes that are occupied, with what is kept for cuts."""
        return self._theta.nbytes + self._copies.nbytes

    def values(self) -> ModelValues:
        """Return the values at this version, which stay as they are as long as somebody has them."""
        return ModelValues.opened(self.model, 0, self.version, self._copies.open(self._theta))

    def advance(self) -> None:
        """Go to the model's version; raises :class:`~pscore.wire.errors.Rejected`."""
        model = self.model
        if model.versions_name_values and model.version == self.version:
            return
        found = self._exact.read(self.version) if model.versions_name_values else None
        if found is None:
            self._copy()
            return
        _, version, (offsets, values) = found
        digest = ModelDigest(model.layout, self.digest)
        digest.remove(SparseSlice(model.span, offsets, values_at(self._theta, offsets)).cpu())
        digest.add(SparseSlice(model.span, offsets, values).cpu())
        self._copies.overwrites(self._theta, offsets)
        if values.is_cpu:  # numpy stays on this thread
            self._theta.numpy()[offsets.numpy()] = values.numpy()
        else:
            self._theta[offsets] = values
        self.version, self.digest = version, digest.value

    def _copy(self) -> None:
        """Copy all values anew."""
        found, start = self._exact.copy(), self.model.span.start
        digest = ModelDigest(self.model.layout)
        self._copies.overwrites(self._theta, None)
        for part in found.parts(self.model.span):
            span = Span(part.span.start - start, part.span.end - start)
            self._theta[span.start : span.end] = part.values
            digest.add(part.cpu())
        self.version, self.digest = found.version, digest.value

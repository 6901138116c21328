"""The weight transfer engine of vLLM's workers that follows a feed. It needs vLLM, which loads it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from psclient import settings as client_settings
from psclient.errors import ConfigurationError
from psclient.integrations.handover import Handover
from psclient.integrations.vllm_server import require_no_token
from psclient.reader.follower import Follower
from psclient.reader.patch_sink import Patch, PatchSink
from psclient.settings import ClientSettings
from pscore.reader.cut import Cut


@dataclass
class FeedInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The feed that a worker follows, and how, as JSON has it.

    Attributes:
        server: the address of each shard, as for a follower; a relay near by spares the line when many workers follow.
        settings: others of :class:`psclient.ClientSettings` by name: ``token_file``, ``tls_ca``, ``run_id``. A token
            itself is refused: others may log what is sent here.
        dtype: ``bfloat16`` or ``float16`` if the parameters come from a run in fp32; empty: as the feed has them.
        directory: of a copy on this machine, from which a worker is restored after a failed update; each worker has
            one below it. Without it the server sends the whole model again.
        seconds: that an update waits for its version.
    """

    server: str | list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""
    directory: str = ""
    seconds: float = 600.0

    def __post_init__(self) -> None:
        require_no_token(self.settings)
        if self.dtype not in ("", "bfloat16", "float16"):
            raise ConfigurationError(f"dtype must be bfloat16, float16 or empty, not {self.dtype!r}")


@dataclass
class FeedUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version to install.

    Attributes:
        weight_version: its name, as :attr:`Published.weight_version` has it: the same one on every worker.
    """

    weight_version: str


class FeedWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Installs versions of a feed that the control plane names; the values come from the feed itself.

    A follower in the worker fetches each version ahead of time, and the worker installs exactly the one that
    ``update_weights`` names. Changes are written through the model's own loader, which maps names, fused weights and
    the parts of parallel workers. The first version, and the one after an update that has failed half-way, are
    loaded whole.
    """

    init_info_cls = FeedInitInfo
    update_info_cls = FeedUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._handover = Handover(self._check, self._install)
        self._follower: Follower | None = None
        self._init_info: FeedInitInfo | None = None
        self._names: frozenset[str] = frozenset()  # of all tensors
        self._history = "", frozenset[int]()  # that they are of: the run, and the generation of each shard

    def init_transfer_engine(self, init_info: FeedInitInfo) -> None:
        """Begin to follow; another call with the same information does nothing, with another begins anew."""
        if self._follower is not None and init_info == self._init_info and not self._follower.is_over:
            return
        self.shutdown()
        self._init_info = init_info
        self._handover, self._names = Handover(self._check, self._install), frozenset()
        self._history = "", frozenset()
        settings = client_settings.resolve(ClientSettings(**init_info.settings), init_info.server, None)
        dtype: torch.dtype | None = getattr(torch, init_info.dtype) if init_info.dtype else None
        rank = f"rank-{self.parallel_config.data_parallel_rank}-{self.parallel_config.rank}"
        directory = Path(init_info.directory) / rank if init_info.directory else None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        sink = PatchSink(self._handover, dtype, directory)
        self._follower = Follower(None, sink, settings, name="", allow_older=True)  # the control plane names versions

    def start_weight_update(self) -> None:
        """Require that a feed is followed; what kind of update it is, is known once the version is there.

        Raises :class:`ConfigurationError` too if following has ended: an ``init_transfer_engine`` begins it anew.
        """
        self._following()

    def receive_weights(self, update_info: FeedUpdateInfo) -> None:
        """Install the version that is named, or raise; only an error of the model's loader may leave a mixture."""
        follower, init_info = self._following()
        self._handover.bring(follower, update_info.weight_version, init_info.seconds)

    def finish_weight_update(self) -> None:
        """Do nothing: a version is whole when ``receive_weights`` returns, and an update that has failed ends too."""

    def shutdown(self) -> None:
        """Stop following."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def _following(self) -> tuple[Follower, FeedInitInfo]:
        if self._follower is None or self._init_info is None:
            raise ConfigurationError("call init_weight_transfer_engine first, with the feed's server")
        if self._follower.is_over:
            why = self._follower.error or "the follower is closed"
            raise ConfigurationError(f"following has ended: {why}; call init_weight_transfer_engine again")
        return self._follower, self._init_info

    def _check(self, cut: Cut, patches: Sequence[Patch]) -> None:
        """Refuse changes that vLLM's sparse loader cannot take, before anything is written."""
        run_id, generations = history = cut.run_id, frozenset(shard.generation for shard in cut.shards)
        if run_id != self._history[0] or not generations & self._history[1]:  # the first version of one is whole
            self._names = frozenset(patch.name for patch in patches)
        self._history = history
        if self._is_whole(patches):
            return
        for patch in patches:
            if not patch.dtype.is_floating_point:
                raise TypeError(
                    f"{patch.name!r} ({patch.dtype}) has changed, and vLLM takes changes of floating-point tensors "
                    "alone: publish the model without it"
                )
            if bool(torch.isnan(patch.values).any()):
                raise FloatingPointError(f"{patch.name!r} has a NaN, which vLLM cannot take: the version before stays")

    def _is_whole(self, patches: Sequence[Patch]) -> bool:
        return all(patch.indices is None for patch in patches) and self._names == {patch.name for patch in patches}

    def _install(self, patches: Sequence[Patch]) -> None:
        """Load all of the model as at a start; or changes over what is there, without that procedure."""
        if not self._is_whole(patches):
            sparse = [self._in_checkpoint(patch, _places(patch)) for patch in patches]
            load_checkpoint_weight_patches(self.model, sparse, validate_unique_indices=False)
            return
        initialize_layerwise_reload(self.model)
        try:
            load_checkpoint_weight_patches(self.model, [self._in_checkpoint(patch, None) for patch in patches])
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def _in_checkpoint(self, patch: Patch, places: torch.Tensor | None) -> CheckpointWeightPatch:
        values = patch.values.reshape(-1)
        if places is None:
            return CheckpointWeightPatch(patch.name, patch.shape, patch.dtype, values, None)
        return CheckpointWeightPatch(
            patch.name, patch.shape, patch.dtype, values.to(self.device), places.to(self.device)
        )


def _places(patch: Patch) -> torch.Tensor:
    """Return where the values go, int64, also for a tensor of which every element has changed."""
    if patch.indices is not None:
        return patch.indices
    return torch.arange(patch.values.numel(), dtype=torch.int64, device="cpu")

"""Going back: a shard becomes what it was at a version or in a checkpoint, under a new generation."""

import logging

from pscore.wire.generation import sibling_generation
from psservice.model.parameters import ModelShard
from psservice.recovery.capture import Content
from psservice.shard import model_install
from psservice.shard.state import ShardState

log = logging.getLogger(__name__)


def roll_back(state: ShardState, version: int | None, checkpoint: str) -> ModelShard:
    """Go back to a version or a checkpoint, as a new generation, which workers pull by themselves.

    What is remembered of pushes stays, so that the repeat of one that was rolled back is not applied anew.

    Raises:
        Refusal: ``NO_SUCH_CHECKPOINT``, where it is not kept; ``NOT_DURABLE``.
    """
    state.require_model(None)
    history = state.persistence.look_back(state, version, checkpoint)

    with state.join_lock:
        model_install.claim(state)
    old = state.model

    def make() -> Content:
        old = state.require_model(None)
        # Of the same epoch: shards go back one by one, and one may be refused; workers wait for equal epochs.
        history.model.generation = sibling_generation(old.generation)
        history.model.begin_rounds_anew(old.waiting())
        run_id = state.run.run_id
        return Content(history.model, history.buffers, history.datasets, run_id, history.run_state, history.samples)

    model_install.install(state, make)
    log.warning("rolled back", extra={"from": old.version if old else 0, "to": history.model.version})
    return history.model

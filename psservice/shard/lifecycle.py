"""A shard opens and recovers, its leases end by the clock, its rounds close, and the run ends with the final model."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from pscore.wire.errors import Rejected
from psservice.durability.initial_model import read_initial
from psservice.durability.storage_error import or_storage_error
from psservice.observability.metrics import Metrics
from psservice.settings import ServerSettings
from psservice.shard.model_install import forget_upload
from psservice.shard.rollback import end_hold
from psservice.shard.shard import Shard
from psservice.state.records import Record, history_of, worker_of
from psservice.state.run import RunState
from psservice.state.v1 import journal_pb2 as rec
from psservice.storage.environment import MACHINE, Environment
from psservice.values import Identity

log = logging.getLogger(__name__)


def open_shard(
    settings: ServerSettings,
    device: torch.device,
    metrics: Metrics,
    on_health: Callable[[], None] = lambda: None,
    on_failure: Callable[[], None] = lambda: None,
    environment: Environment = MACHINE,
) -> Shard:
    """Recover a shard, or begin an empty one, and start its threads (``ModelFileError``, ``StorageError``)."""
    shard = Shard(settings, device, metrics, on_health, on_failure, environment)
    try:
        shard.durability.recover()
        if settings.init and shard.model is None:
            shard.uploads.initial = read_initial(settings.init, settings.init_checkpoint)
        if settings.data_dir is not None:
            with or_storage_error(settings.data_dir):
                _resume_end(shard)
    except BaseException:
        shard.apply_thread.close()
        shard.durability.abandon()
        raise
    shard.durability.start()
    shard.lease_ends = environment.start(partial(_end_leases_in_time, shard), "lease-ends")
    return shard


def _end_leases_in_time(shard: Shard) -> None:
    while not shard.stopping.wait(min(1.0, shard.settings.lease_seconds / 8)):
        end_leases(shard)


def end_leases(shard: Shard) -> None:
    """End the leases that have run out; the thread of leases calls this often."""
    with shard.join_lock:
        end_left_workers(shard)
    note_histories(shard)
    forget_old_pushes(shard)
    forget_upload(shard)
    end_hold(shard)
    if shard.ends_with is not None and not shard.run.is_finished and shard.model is not None:
        with suppress(Rejected):  # busy, or not durable: it is tried again
            shard.apply_thread.run(lambda: end_if_over(shard))
    close_rounds_after_leave(shard)


def end_left_workers(shard: Shard) -> None:
    """Write the ends of leases, before one of these names joins again; ``join_lock`` is held.

    An end that cannot be written is tried again with the next.
    """
    for member in shard.leases.pop_ended():
        shard.metrics.leases_expired.inc()
        log.warning(
            "lease ended: worker is taken for dead",
            extra={"worker": member.identity.worker_id, "last_step": member.last_step},
        )
    live = shard.leases.identities()  # at once for all: every join asks
    for worker in shard.state.workers:
        if worker.identity not in live:
            commit_or_warn(shard, rec.Left(worker=worker_of(worker.identity)))
            shard.tell_shards()


def note_histories(shard: Shard) -> None:
    """Write down what workers have told of the other shards; not while the model is replaced, since that forgets it."""

    def note() -> None:
        if heard := shard.state.histories.heard():
            shard.commit(rec.Known(histories=map(history_of, heard)))

    if shard.model is not None and shard.state.histories.heard():
        with suppress(Rejected):  # held, or not durable: it is tried again
            shard.apply_thread.run(note)


def commit_or_warn(shard: Shard, record: Record) -> None:
    """Commit a record that nobody waits for; a later attempt brings it if it cannot be written now."""
    try:
        shard.change(record)
    except Rejected as error:
        log.warning("not written down yet", extra={"what": type(record).__name__, "error": str(error)})


def forget_old_pushes(shard: Shard) -> None:
    """Drop the records of pushes that are too old or too many."""

    def forget() -> None:
        live = {worker.identity for worker in shard.state.workers}
        if old := shard.state.pushes.old(live):
            shard.commit(rec.Forgot(workers=map(worker_of, old)))

    with suppress(Rejected):  # no room, or stopping
        shard.apply_thread.run(forget, while_held=True)


def close_rounds_after_leave(shard: Shard) -> None:
    """Close the round that waited for nobody but workers whose leases have ended."""
    with suppress(Rejected):  # busy, or not durable: the round is still due next time
        close_due_rounds(shard)


def close_due_rounds(shard: Shard) -> None:
    """Close the round if it is due, from any thread."""
    synchronizer = shard.synchronizer
    if synchronizer is None or not synchronizer.is_due():
        return

    def close() -> None:
        if shard.synchronizer is synchronizer:
            synchronizer.close_if_due()
            end_if_over(shard)

    shard.apply_thread.run(close)


def end_if_over(shard: Shard, by: tuple[Identity, int] | None = None) -> None:
    """End the run if its counts have reached its end, or shard 0 has ended it; on the apply thread."""
    if shard.run.is_over(shard.require_model(None).version) or _has_last_push(shard):
        _end(shard, by)


def _has_last_push(shard: Shard) -> bool:
    """Tell whether shard 0 has ended the run, and this shard has applied the push that ended it, if that comes."""
    if shard.ends_with is None or shard.run.is_finished:
        return False
    end = shard.ends_with
    return shard.state.pushes.find(end.worker).step >= end.step or not shard.leases.is_live(end.worker)


def finish(shard: Shard) -> str:
    """End the run, write the final model if asked to, and return its path."""
    shard.apply_thread.run(lambda: _end(shard))
    shard.durability.records.wait()
    return shard.final_model.wait()


def _end(shard: Shard, by: tuple[Identity, int] | None = None) -> None:
    """End the run; on the apply thread, so that the final model is the one at the last version.

    ``by`` is the push that has ended it: its worker and step.

    If the run has ended and that model could not be written, write it again: a full disk may have room by now.
    """
    model = shard.require_model(None)
    if shard.run.is_finished:
        if shard.final_model.has_failed:
            shard.final_model.begin(shard.copy_now, shard.run.run_id)
        return
    if shard.synchronizer is not None:
        shard.synchronizer.close()
    shard.commit(rec.Finished())
    shard.last_push = by
    log.info("run finished", extra={"version": model.version, "samples": shard.run.samples})
    shard.tell_shards()
    shard.leases.waiters.wake(everyone=True)
    shard.final_model.begin(shard.copy_now, shard.run.run_id)


def _resume_end(shard: Shard) -> None:
    """Finish the end of a run in the middle of which the server has died."""
    run, model = shard.run, shard.model
    if model is None:
        return
    if run.state is RunState.TRAINING and run.is_over(model.version):
        shard.apply_thread.run(lambda: _end(shard))
    elif run.state is RunState.FINISHED and not shard.final_model.is_there(run.run_id, model.version):
        shard.final_model.begin(shard.copy_now, run.run_id)

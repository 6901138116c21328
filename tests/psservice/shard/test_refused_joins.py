"""A join that is refused changes nothing: no lease, no method, no layout, no upload."""

import threading
from contextlib import ExitStack

import pytest
import torch

from pscore.model import modelfile
from pscore.wire.errors import ErrorCode
from psservice.shard import model_install
from psservice.shard.join import evict, leave
from psservice.values import Identity
from tests.psservice.durability.test_recovery import Shard, after_a_crash
from tests.psservice.service_makers import BF16, F32, layout_of
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    HOUR,
    READY,
    UPLOAD,
    full,
    join,
    lease,
    open_shards,
    reason_of,
    upload,
    with_clock,
)

LAYOUT = layout_of((6, F32), (4, BF16))
OTHER = layout_of((6, F32), (5, BF16))
ONES = torch.ones(10)
SECONDS = 5.0
AGAIN = Identity("anna", "2")
IMPOSSIBLE = full(5 << 29)
UNREADABLE = {"rounds": "every Tuesday"}


def state(shard):
    """Everything that a join can change."""
    return (
        [(member.identity, member.lease_end, member.worker.index_codecs) for member in shard.leases.members()],
        (shard.run.run_id, shard.run.method, dict(shard.run.method_settings), shard.run.state),
        (shard.state.mode, shard.state.layout and shard.state.layout.fingerprint, shard.model, shard.installing),
        (shard.uploads.progress(), shard.uploads.initial),
    )


def full_disk(*_):
    raise OSError(28, "No space left on device")


def empty(stack, directory, **settings):
    (shard,) = stack.enter_context(open_shards(data_dir=directory / "data", **settings))
    return shard


def ready(stack, directory, **settings):
    shard = empty(stack, directory, **settings)
    upload(shard, ONES, ANNA, join(shard, LAYOUT, ANNA, method_settings={"momentum": "0.5"}).generation)
    return shard


def with_initial(stack, directory, **settings):
    state = modelfile.assemble(LAYOUT, ONES, ())
    modelfile.write(directory / "init.safetensors", state, {})
    return empty(stack, directory, init=directory / "init.safetensors", **settings)


def drain(shard):
    shard.drain_gate.is_closed = True


def claim(shard):
    with shard.join_lock:
        model_install.claim(shard)


NOTHING = {}
SAME = {"method_settings": {"momentum": "0.5"}}
WAYS = {
    "drained": (empty, drain, (LAYOUT, ANNA), NOTHING, ErrorCode.DRAINING),
    "unreadable settings": (empty, None, (LAYOUT, ANNA), {"method_settings": UNREADABLE}, ErrorCode.BAD_REQUEST),
    "impossible epoch": (empty, None, (LAYOUT, ANNA), {"seen": IMPOSSIBLE}, ErrorCode.BAD_REQUEST),
    "impossible epoch of a replica": (
        ready, None, (LAYOUT, BERT), SAME | {"seen": IMPOSSIBLE, "has_replica": True}, ErrorCode.BAD_REQUEST
    ),
    "impossible epoch, and known": (
        ready, None, (LAYOUT, ANNA), SAME | {"seen": IMPOSSIBLE, "has_replica": True}, ErrorCode.BAD_REQUEST
    ),
    "another model": (ready, None, (OTHER, BERT), SAME, ErrorCode.FINGERPRINT_MISMATCH),
    "another method": (ready, None, (LAYOUT, BERT), SAME | {"method": "asgd"}, ErrorCode.SETTINGS_MISMATCH),
    "another setting": (ready, None, (LAYOUT, BERT), {"method_settings": {}}, ErrorCode.SETTINGS_MISMATCH),
    "evicted": (
        ready, lambda shard: evict(shard, "anna", HOUR), (LAYOUT, ANNA), SAME, ErrorCode.EVICTED
    ),
    "evicted, of an empty shard": (
        empty, lambda shard: shard.leases.evict("anna", HOUR), (LAYOUT, ANNA), NOTHING, ErrorCode.EVICTED
    ),
    "evicted, with a model to begin from": (
        with_initial, lambda shard: shard.leases.evict("anna", HOUR), (LAYOUT, ANNA), NOTHING, ErrorCode.EVICTED
    ),
    "alive": (ready, None, (LAYOUT, AGAIN), SAME, ErrorCode.WORKER_ALIVE),
    "does not fit the model to begin from": (
        with_initial, None, (OTHER, ANNA), NOTHING, ErrorCode.FINGERPRINT_MISMATCH
    ),
    "another model is on its way": (with_initial, claim, (LAYOUT, ANNA), NOTHING, ErrorCode.BUSY),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_join_changes_nothing(way, tmp_path):
    make, prepare, arguments, options, reason = WAYS[way]
    with ExitStack() as stack:
        shard = make(stack, tmp_path)
        clock = with_clock(shard)
        if prepare is not None:
            prepare(shard)
        clock.now += 1.0  # a lease that were renewed would end later
        before = state(shard)
        for _ in range(2):
            assert reason_of(join, shard, *arguments, **options) is reason
            assert state(shard) == before


@pytest.mark.parametrize(
    ("make", "written"),
    [(empty, "os.writev"), (with_initial, "os.writev"), (with_initial, "psservice.storage.tensor_file.write")],
)
def test_a_join_that_the_disk_refuses_changes_nothing(make, written, tmp_path, monkeypatch):
    with ExitStack() as stack:
        shard = make(stack, tmp_path)
        before = state(shard)
        with monkeypatch.context() as patched:
            patched.setattr(written, full_disk)
            assert reason_of(join, shard, LAYOUT, ANNA, "asgd") is ErrorCode.NOT_DURABLE
            assert state(shard) == before
        join(shard, LAYOUT, BERT, "dgs")  # nothing was agreed on with a worker that is not there
        assert shard.run.method == "dgs"


def test_a_lease_that_ends_while_its_worker_joins_is_journaled_again(tmp_path):
    """Else a restart would know of no lease of a worker that lives."""
    with ExitStack() as stack:
        shard = ready(stack, tmp_path)
        clock = with_clock(shard)
        real = shard.leases.require_free

        def late(identity):
            clock.now += HOUR + 1
            return real(identity)

        shard.leases.require_free = late
        assert join(shard, LAYOUT, ANNA, method_settings={"momentum": "0.5"}).state == READY
        with Shard(after_a_crash(tmp_path / "data")) as again:
            assert again.leases.is_live(ANNA)


def test_leases_end_while_the_model_to_begin_from_is_laid_out(tmp_path, monkeypatch):
    real, ended = model_install.fit, []
    with ExitStack() as stack:
        shard = with_initial(stack, tmp_path)
        lease(shard, BERT)

        def fit(*arguments, **options):
            leaving = threading.Thread(target=leave, args=(shard, BERT), daemon=True)
            leaving.start()
            leaving.join(SECONDS)
            ended.append(not leaving.is_alive())
            return real(*arguments, **options)

        monkeypatch.setattr(model_install, "fit", fit)
        assert reason_of(join, shard, OTHER, ANNA) is ErrorCode.FINGERPRINT_MISMATCH
        assert join(shard, LAYOUT, ANNA).state == READY
        assert ended == [True, True]


@pytest.mark.parametrize("is_there_at_first", [True, False])
def test_a_model_to_begin_from_that_comes_or_goes_while_a_worker_joins_is_looked_at_again(
    is_there_at_first, tmp_path, monkeypatch
):
    """Another worker's join takes it, and gives it back if the disk refuses its snapshot."""
    with ExitStack() as stack:
        shard = with_initial(stack, tmp_path)
        initial, real = shard.uploads.initial, model_install.fit_initial
        if not is_there_at_first:
            shard.uploads.initial = None

        def fit_initial(*arguments):
            fitted = real(*arguments)
            shard.uploads.initial = None if is_there_at_first else initial
            return fitted

        monkeypatch.setattr(model_install, "fit_initial", fit_initial)
        state = join(shard, LAYOUT, ANNA).state
        assert state == (UPLOAD if is_there_at_first else READY)

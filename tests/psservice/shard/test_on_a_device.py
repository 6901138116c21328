"""A shard on a device does what one on the host does, bit for bit, and waits for the device a bounded number of times.

The device is none (:mod:`tests.psservice.fake_device`): what it shows is which tensors are where, and what waits.
"""

import json

import pytest
import torch

from pscore.model.sparse_slice import SparseSlice
from psservice.model.undo_log import Overwritten, UndoLog
from psservice.observability.metrics import Metrics
from psservice.settings import ServerSettings
from psservice.shard.lifecycle import end_leases, open_shard
from psservice.storage.environment import Environment
from tests.psservice.durability.test_recovery import send
from tests.psservice.fake_device import DEVICE, FakeDevice
from tests.psservice.service_makers import BF16, F16, F32, layout_of, sparse_push
from tests.psservice.shard_makers import ANNA, BERT, HOUR, join, pull, theta, upload
from tests.tiers import long_but

LAYOUT = layout_of(((20, 30), F32), (300, BF16), (50, F16), ((), F32), (400, F32))
ADAM = {"update": "torch", "optimizer": json.dumps({"name": "Adam", "options": {"lr": 0.01}})}
ADAGRAD = json.dumps({"name": "Adagrad", "options": {"lr": 0.01, "lr_decay": 0.1}})
RMSPROP = json.dumps({"name": "RMSprop", "options": {"lr": 0.01, "alpha": 0.75}})
GROUPS = json.dumps([{"tensors": [0, 3], "options": {"lr": 0.1}}, {"tensors": [4], "options": {}}])
KINDS = {
    "subtract": ({}, {}),
    "compensated": ({}, {"delay_compensation": 0.1}),
    "topk": ({}, {"down_mode": "topk", "down_density": 0.1, "down_dense_below": 60}),
    "rounds": ({"rounds": json.dumps({"quorum": 0, "seconds": 0, "start_workers": 1})}, {}),
    "wagma": ({"update": "average", "group_size": "2", "tau": "3", "late": "replace"}, {}),
    "rmsprop": ({"update": "rmsprop", "optimizer": RMSPROP, "groups": GROUPS}, {}),
    "adagrad": ({"update": "adagrad", "optimizer": ADAGRAD, "groups": GROUPS}, {}),
    "adam": (ADAM, {}),
    "lazy": (ADAM | {"lazy": "true", "groups": GROUPS}, {}),
}


def opened(directory, device, **settings):
    given = {"lease_seconds": HOUR, "snapshot_seconds": HOUR, "data_dir": directory, "ledger_multiple": 50, **settings}
    environment = Environment(is_threaded=False, monotonic=lambda: 0.0)  # no round depends on how fast this machine is
    return open_shard(ServerSettings(**given), device, Metrics(), environment=environment)


def pulled(shard, who, state):
    """Pull, and return the bytes of the reply."""
    base, acknowledged, image = state.get(who, (None, 0, False))
    reply = pull(shard, who, base=base, acknowledged=acknowledged, image=image)
    state[who] = reply.version, reply.number, reply.image
    return reply.mode, reply.version, b"".join(reply.messages)


def lived(directory, device, words, settings):
    """Push, pull, take a snapshot, die, recover, and go on; return all that workers saw, and the parameters."""
    seen, state = [], {}
    values = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(9))
    shard = opened(directory, device, **settings)
    for who in (ANNA, BERT):
        joined = join(shard, LAYOUT, who, "x", words)
        if shard.model is None:
            upload(shard, values, who, joined.generation)
    for life in range(2):
        for step in range(6 * life + 1, 6 * life + 7):
            for turn, who in enumerate((ANNA, BERT)):
                part = sparse_push(shard.span, 0.05, 2 * step + turn)
                if step % 6 == 5:
                    part = SparseSlice(shard.span, None, values * 0.1)
                send(shard, step, part, who, base=state.get(who, (0,))[0], learning_rate=0.1)
                end_leases(shard)
            seen += [pulled(shard, who, state) for who in (ANNA, BERT)]
            if step % 6 == 3:
                shard.durability.take()
        seen.append(theta(shard).cpu())
        if not life:
            shard.durability.abandon()
            shard = opened(directory, device, **settings)
            seen.append(theta(shard).cpu())
            state[ANNA] = 2, 0, False  # from before the snapshot: recovery has read these changes from the journal
            seen += [pulled(shard, who, state) for who in (ANNA, BERT)]
    shard.close()
    return seen


@pytest.mark.parametrize("kind", long_but(list(KINDS)[:3], KINDS))
def test_pushes_replies_snapshots_and_recovery_are_those_of_the_host(kind, tmp_path):
    words, settings = KINDS[kind]
    expected = lived(tmp_path / "host", torch.device("cpu"), words, settings)
    with FakeDevice():
        found = lived(tmp_path / "device", DEVICE, words, settings)
    for mine, theirs in zip(found, expected, strict=True):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs


@pytest.mark.parametrize(
    "kind", long_but(["subtract", "lazy"], ["subtract", "compensated", "rounds", "rmsprop", "adagrad", "adam", "lazy"])
)
def test_a_push_and_a_pull_wait_for_the_device_as_often_for_few_tensors_as_for_many(kind, tmp_path):
    words, settings = KINDS[kind]
    words = {name: value for name, value in words.items() if name != "groups"}
    found = []
    for count in (4, 24):
        layout = layout_of(*((60, (F32, BF16)[n % 2]) for n in range(count)))
        with FakeDevice() as device:
            shard = opened(tmp_path / str(count), DEVICE, **settings)
            upload(shard, torch.ones(layout.size), ANNA, join(shard, layout, ANNA, "x", words).generation)
            state, waits = {}, []
            for step in (1, 2, 3):
                pulled(shard, ANNA, state)
                before = device.waits
                send(shard, step, sparse_push(shard.span, 0.3, step), base=state[ANNA][0], learning_rate=0.1)
                waits.append(device.waits - before)
            pulled(shard, ANNA, state)
            waits.append(device.waits - before - waits[-1])
            shard.close()
        found.append(waits)
    assert found[0] == found[1]
    assert max(found[0]) <= 4


def test_the_values_of_an_older_version_are_found_without_waiting():
    theta, log, before = torch.randn(50), UndoLog(1000), {}
    with FakeDevice() as device:
        there = theta.to(DEVICE)
        for version in range(1, 6):
            before[version - 1] = there.cpu()
            offsets = torch.arange(version, 50, 3)
            log.append(Overwritten(version, offsets.to(torch.int32), there[offsets.to(DEVICE)]))
            there[offsets.to(DEVICE)] = torch.randn(offsets.numel()).to(DEVICE)
        wanted, found, waits = torch.arange(0, 50, 2), [], device.waits
        for version in range(5):
            found.append(log.at(there, version, 5, wanted.to(DEVICE)))
        assert device.waits == waits
        for version, values in enumerate(found):
            assert torch.equal(values.cpu(), before[version][wanted])

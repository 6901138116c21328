"""Reading beside the apply thread: whoever sees a version finds it in the ledger."""

import threading

import torch

from psservice.model.changelog import ChangeLog
from tests.psservice.service_makers import F32, layout_of, shard_of, sparse_push


def test_a_version_is_in_the_ledger_before_it_is_seen(monkeypatch):
    layout = layout_of((1000, F32))
    model = shard_of(layout, torch.zeros(1000))
    seen = []
    original = ChangeLog.append

    def append(self, version, support):
        seen.append((model.version, version))
        original(self, version, support)

    monkeypatch.setattr(ChangeLog, "append", append)
    for seed in range(5):
        model.apply(sparse_push(model.span, 0.1, seed))
    assert seen == [(version, version + 1) for version in range(5)]


def test_readers_never_see_a_version_that_the_ledger_lacks():
    layout = layout_of((1000, F32))
    model, done, missing = shard_of(layout, torch.zeros(1000)), threading.Event(), []

    def read():
        while not done.is_set():
            version = model.version
            since = model.changelog.since(0)
            if since is not None and len(since) < version:
                missing.append((version, len(since)))

    reader = threading.Thread(target=read)
    reader.start()
    for seed in range(300):
        model.apply(sparse_push(model.span, 0.01, seed))
    done.set()
    reader.join()
    assert not missing

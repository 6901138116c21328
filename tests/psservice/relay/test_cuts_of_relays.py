"""A cut of a relay has the values and the buffers of one cut of its source, whenever a version is published."""

import pytest
import torch

from pscore.model.buffers import pack
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.reader.transfer import digest_of_buffers
from psservice.cuts.cuts import Wanted
from psservice.cuts.shadow import Shadow
from tests.psservice.relay_makers import MadeSource, RelayHistory

LAYOUT = ModelLayout((TensorSpec("w", (30,), torch.float32),), buffers=(TensorSpec("mean", (4,), torch.float32),))


@pytest.mark.parametrize("values_change", [True, False])
@pytest.mark.parametrize("publishes_first", [True, False])
def test_a_version_that_is_published_while_a_cut_is_made(monkeypatch, values_change, publishes_first):
    source = MadeSource(LAYOUT, torch.arange(30, dtype=torch.float32))
    relay = RelayHistory(source)
    relay.follow()
    pairs = {source.cut().shards[0][:2]: {source.cut().buffers_digest}}
    if values_change:
        source.change(7)
    source.buffers = pack([torch.full((4,), 9.0)])
    cut = relay.fetch()  # and it is published while readers' cut is made
    pairs.setdefault(cut.shards[0][:2], set()).add(cut.buffers_digest)
    left, advance = [cut], Shadow.advance

    def advance_and_publish(shadow, types):
        if publishes_first and left:
            relay.publish(left.pop())
        advance(shadow, types)
        if left:
            relay.publish(left.pop())

    monkeypatch.setattr(Shadow, "advance", advance_and_publish)
    cuts = relay.shard.cuts
    cuts.take_part(Wanted(1, (None,)))
    made = cuts._kept[-1]
    assert not left
    assert made.buffers_digest == digest_of_buffers(made.buffers)
    assert made.buffers_digest in pairs[made.generation, made.version]
    assert made.publication == cut.name
    assert made.buffers_digest == cut.buffers_digest

"""What a step asks of a device is held by counts: calls whatever the tensors, and bytes by the entries."""

import pytest

pytest.importorskip("triton")

from benchmarks.gpu import fake_device
from benchmarks.workload.layouts import gpt2, resnet18


@pytest.mark.parametrize(("layout", "groups"), [(resnet18(), 2), (gpt2(), 13)], ids=["resnet18", "gpt2"])
def test_a_warm_step_is_four_launches_one_copy_each_way_and_one_wait_for_all_groups(layout, groups):
    counted, entries, found = fake_device.count(layout)
    assert found == groups
    assert (counted.launches, counted.copies_up, counted.copies_down, counted.waits) == (4, 1, 1, 1)
    assert entries == pytest.approx(fake_device.DENSITY * layout.size, rel=0.05)
    assert counted.bytes_down <= 1.4 * fake_device.ENTRY_BYTES * entries
    assert counted.bytes_up <= 200 * len(layout.parameters)
    assert counted.device_bytes <= 0.4 * layout.size

"""What load generators replay, and how pushes at the edge of a window count."""

import numpy as np
import psutil
import pytest

from benchmarks.harness.generators import Generators, Window, push_share
from benchmarks.harness.load_generator import Step, read_frames, write_frames
from benchmarks.scale.real import Stage
from benchmarks.workload.layouts import noise_push, one_tensor
from benchmarks.workload.raw_worker import RawWorker, join_request, push_messages
from psclient import LocalServer


def test_frames_are_read_as_written(tmp_path):
    frames = [b"join", b"", b"x" * 70_000]
    write_frames(tmp_path / "frames", frames)
    assert read_frames(tmp_path / "frames") == frames


@pytest.mark.parametrize(
    ("push", "share"), [((11, 12), 1), ((8, 12), 0.5), ((12, 16), 0.25), ((0, 9), 0), ((5, 25), 0.15)]
)
def test_a_push_that_the_window_cuts_counts_in_part(push, share):
    assert push_share(push, 10, 13) == pytest.approx(share)


def test_replayed_pushes_are_applied_and_the_generators_end(tmp_path):
    layout = one_tensor(5_000)
    push, path = noise_push(layout, 0.01, 0, np.random.default_rng(0)), tmp_path / "push"
    write_frames(path, [join_request(layout).SerializeToString(), *push_messages(layout, push, 1 << 20)])
    with LocalServer(down_mode="exact", buffers="none") as server:
        with RawWorker(server.addresses[0], layout, "uploader"):
            pass
        process = psutil.Process(server.processes[0].pid)
        with Generators(server.addresses[0], [path], ["a", "b", "c"], 2) as generators:
            window = generators.measure(process, 0.3)
        with RawWorker(server.addresses[0], layout, "reader") as reader:
            reader.pull()
            assert reader.version >= window.pushes > 0
    assert window.server_cpu > 0


def test_steps_outside_of_the_window_are_not_counted():
    steps = [[Step(0.0, 0.1, 0.2, 5, 100, 50), Step(1.0, 1.1, 1.2, 1, 100, 50), Step(1.9, 2.1, 2.2, 9, 100, 50)]]
    seen = Window.of(steps, (1.0, 10.0, 1.0), (2.0, 10.5, 1.25))
    assert seen.pushes == pytest.approx(1 + 1 / 3)
    assert seen.staleness == 1
    assert (seen.server_cpu, seen.generator_cpu) == (0.5, 0.25)


@pytest.mark.long
def test_a_worker_of_several_shards_thinks_pulls_and_takes_its_updates_in_turn():
    with Stage(3_000, 0.01, 2, 2, "exact", 0) as stage:
        seen = stage.run(2, 0.02, 0.5)
    assert seen.pushes > 0
    assert seen.received > seen.sent / 10 > 0
    assert seen.push_seconds > 0

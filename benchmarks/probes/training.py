"""Two workers and their server: our optimizers over gloo's isend and irecv, in steps a second and in CPU time."""

import common  # beside this file

from benchmarks.peers import gloo, peers
from benchmarks.peers.task import Job


def measure(steps: int, gradients_given: bool) -> dict[str, float]:
    """Run one job of :mod:`benchmarks.peers` through gloo, DGS (1 %) and ASGD.

    Args:
        steps: of each worker, after a warm-up.
        gradients_given: see :class:`~benchmarks.peers.task.Job`.
    """
    job = Job(steps, 0, gradients_given)
    with peers.through_torch(gloo.server, gloo.worker, job) as parties:
        dense = peers.measure(job, parties)
    figures = {"gloo_rate": dense.steps_per_second, "gloo_cpu_ms": 1e3 * dense.server_cpu}
    for method in ("dgs", "asgd"):
        with peers.through_us(method, job, 0.01) as parties:
            found = peers.measure(job, parties)
        figures[f"{method}_rate"] = found.steps_per_second / dense.steps_per_second
        figures[f"{method}_cpu"] = found.server_cpu / max(dense.server_cpu, _TICK / job.exchanges)
    return figures


_TICK = 0.01
"""Seconds in which the kernel counts CPU time."""

if __name__ == "__main__":
    common.run(measure)

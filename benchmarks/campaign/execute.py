"""Do one run: a server, its workers, the test of the server's model at the end."""

import math
from contextlib import ExitStack

import torch

import psclient
from benchmarks.campaign import worker
from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.processes import server
from benchmarks.campaign.spec import Outcome, Spec
from benchmarks.campaign.tasks import TASKS
from benchmarks.campaign.worker import Told
from benchmarks.harness.children import Child, begin
from pscore.units import LONGEST_SECONDS

_START_SECONDS, _STEP_SECONDS = 120.0, 0.1
_SLACK = 20.0  # times the expected seconds, on a machine that does other things too


def execute(spec: Spec) -> Outcome:
    """Train and test.

    Raises:
        ChildFailedError: a process failed, or did not answer in time.
    """
    method = METHODS[spec.method]
    if method.kind == "single":
        told = _train(spec, "")
        return _outcome(spec, told, {name: torch.from_numpy(array) for name, array in told[0].state.items()})
    with server(server_settings(spec)) as address:
        told = _train(spec, address)
        return _outcome(spec, told, psclient.download(address))


def server_settings(spec: Spec) -> dict[str, object]:
    """Return the settings of the server.

    Simulated workers are one process: they live and end together, so no lease ends. Otherwise a machine that holds this
    process up would end a lease, its worker would join again with the whole model, and the run would train differently.
    """
    settings = spec.form.server | METHODS[spec.method].server(spec.workers)
    return settings | {"lease_seconds": LONGEST_SECONDS} if spec.simulated else settings


def _train(spec: Spec, address: str) -> list[Told]:
    seconds = worker.CALL_SECONDS + most_seconds(spec)
    if spec.simulated:
        with Child(f"the workers of {spec.method}", worker.take_turns, spec, address) as child:
            told: list[Told] = child.hear(_START_SECONDS + seconds)
            return told
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Child(f"worker {number} of {spec.method}", worker.work, spec, number, address))
            for number in range(spec.workers)
        ]
        begin(workers, _START_SECONDS)
        return [each.hear(seconds) for each in workers]


def most_seconds(spec: Spec) -> float:
    """Return the longest that all steps may take."""
    return spec.steps * (spec.workers * _STEP_SECONDS + spec.pace) + _SLACK * spec.expected_seconds


def _outcome(spec: Spec, told: list[Told], state: dict[str, torch.Tensor]) -> Outcome:
    task = TASKS[spec.task]
    model = task.make_model()
    model.load_state_dict(state)
    quality = task.evaluate(model, spec.validation)
    diverged = any(each.diverged for each in told) or not math.isfinite(quality.loss)
    staleness = torch.tensor([float(value) for each in told for value in each.staleness] or [0.0])
    return Outcome(
        score=None if diverged else quality.of(task.metric),
        loss=None if diverged else quality.loss,
        up_bytes=sum(each.up_bytes for each in told),
        down_bytes=sum(each.down_bytes for each in told),
        versions=max(each.version for each in told),
        mean_staleness=staleness.mean().item(),
        p99_staleness=torch.quantile(staleness, 0.99).item(),
        refused=sum(each.refused for each in told),
        seconds=max(each.seconds for each in told),
        curve=[(step, up * spec.workers, down * spec.workers, score) for step, up, down, score in told[0].curve],
    )

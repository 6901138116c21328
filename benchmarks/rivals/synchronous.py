"""A worker of a rival: all make each step together, or average every few steps; a lost worker is done without.

How survivors go on is the best that can be written with torch: a closed connection tells them at once, they form a new
group in the same process, and nothing is read from a checkpoint. torchrun would restart every process.
"""

import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

from benchmarks.campaign.worker import clip, decay
from benchmarks.network.lab import enter
from benchmarks.rivals.contenders import (
    CONTENDERS,
    DENSE_STEPS,
    INNERS,
    LEAST_DENSE_STEPS,
    OUTER_MOMENTUM,
    OUTER_RATE,
    PERIOD,
    Hook,
)
from benchmarks.rivals.worker import Job, Loop

_BUCKET_MB = 1000  # one bucket: with more of them PowerSGD does not end over gloo
_MOST_SECONDS = 120.0
_CALLBACK_SECONDS = 0.1
_ALL, _SURVIVORS, _ALL_AGAIN = range(3)  # the groups, in their order


def average_and_train(connection: Connection, job: Job, rank: int, space: str, folder: str, card: str) -> None:
    """Train with the others; a rank beyond the last is the worker that takes the lost one's place."""
    if space:
        enter(space)
    os.environ["GLOO_SOCKET_IFNAME"] = card
    loop, inner, contender = Loop(job, rank), INNERS[job.inner], CONTENDERS[job.contender]
    group = _Group(loop, folder)
    optimizer = inner.make(loop.model.parameters(), job.rate * inner.rate_scale)
    highest = optimizer.param_groups[0]["lr"]
    outer = _Outer(loop.model) if contender.outer else None
    is_late = rank == job.workers
    step = job.back_at if is_late else 0
    if not is_late:
        group.meet(_ALL)
        dist.barrier()
    loop.start(connection)
    while (batches := batches_before(job, step)) < job.steps * job.workers:
        if job.back_at and step == job.back_at:
            group.meet(_ALL_AGAIN)
            _share_state(optimizer)
            if outer is not None:
                outer.share()
        for each in optimizer.param_groups:
            each["lr"] = highest * decay(batches / job.workers, job.all_steps)
        group.survive(lambda: loop.gradient(group.model))
        clip(loop.model)
        if contender.local:
            loop.wait()
        optimizer.step()
        if contender.local and step % PERIOD == PERIOD - 1:
            group.survive(outer.step if outer is not None else lambda: _average(loop.model))
        step += 1
        loop.stepped()
        loop.die_if_due(step)
    told = loop.end(loop.model.state_dict)
    dist.barrier()
    dist.destroy_process_group()
    connection.send(told)


def batches_before(job: Job, step: int) -> int:
    """Return the batches that all workers together have trained before a step; while one is lost, it makes none."""
    absent = min(step, job.back_at) - job.lost_at if job.lost_at else 0
    return step * job.workers - max(0, absent)


class _Group:
    """The workers that are there.

    Args:
        loop: of this one.
        folder: where they meet.

    Attributes:
        model: what is called with a batch.
    """

    def __init__(self, loop: Loop, folder: str) -> None:
        self.model = loop.model
        self._loop, self._folder = loop, folder

    def survive(self, work: Callable[[], None]) -> None:
        """Do something with the others; where a connection is closed and one may be lost, again without that one."""
        try:
            work()
        except RuntimeError:
            if not self._loop.job.lost_at:
                raise
        else:
            return
        self.meet(_SURVIVORS)
        work()

    def meet(self, number: int) -> None:
        """Form a group in the place of the one before, and give all members the first one's model."""
        job, contender = self._loop.job, CONTENDERS[self._loop.job.contender]
        self.model = self._loop.model
        if dist.is_initialized():
            before = [dist.distributed_c10d._get_default_group()]
            dist.destroy_process_group()
            gc.collect()  # what was wrapped before keeps connections open, on which others wait
            time.sleep(_CALLBACK_SECONDS)  # torch aborts where the last reference goes in a thread of the group's own
            before.clear()
        dist.init_process_group(
            "gloo",
            init_method=f"{self._folder}/{number}",
            rank=min(self._loop.rank, job.workers - 1),
            world_size=job.workers - (number == _SURVIVORS),
            timeout=timedelta(seconds=_MOST_SECONDS),
        )
        if contender.local:
            if number != _SURVIVORS:  # who keep what each of them has learnt since the last average
                for parameter in self._loop.model.parameters():
                    dist.broadcast(parameter.detach(), 0)
            return
        model = DistributedDataParallel(self._loop.model, bucket_cap_mb=_BUCKET_MB)
        whole: tuple[Any, Hook] = None, allreduce_hook
        dense_steps = LEAST_DENSE_STEPS if number else DENSE_STEPS
        state, hook = whole if contender.hook is None else contender.hook(dense_steps)
        model.register_comm_hook(state, _paced(hook, self._loop.wait))
        self.model = model


class _Outer:
    """DiLoCo's outer optimizer, the same on every worker, as torchft has it (Douillard et al., 2023, algorithm 1).

    Args:
        model: has the parameters that all workers begin with.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._before = [parameter.detach().clone() for parameter in self._parameters]
        self._optimizer = torch.optim.SGD(self._before, OUTER_RATE, OUTER_MOMENTUM, nesterov=True)

    @torch.no_grad()
    def step(self) -> None:
        """Send how far the parameters have moved, all in one message, and begin where the mean of it leads."""
        moved = [before - now for before, now in zip(self._before, self._parameters, strict=True)]
        flat = torch.cat([each.flatten() for each in moved])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = torch.split(flat, [before.numel() for before in self._before])
        for before, part in zip(self._before, parts, strict=True):
            before.grad = part.view_as(before)
        self._optimizer.step()
        for before, now in zip(self._before, self._parameters, strict=True):
            now.copy_(before)

    @torch.no_grad()
    def share(self) -> None:
        """Give the worker that has come what this optimizer has gathered; its model is the others' already."""
        for before, now in zip(self._before, self._parameters, strict=True):
            before.copy_(now)
        _share_state(self._optimizer)


def _share_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the worker that has come what the others' optimizers have gathered."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not optimizer.state:  # a step of nothing makes it
        rates = [group["lr"] for group in optimizer.param_groups]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for parameter in parameters:
        for value in optimizer.state[parameter].values():
            if isinstance(value, torch.Tensor):
                dist.broadcast(value, 0)


def _average(model: nn.Module) -> None:
    average_parameters(model.parameters(), dist.distributed_c10d._get_default_group())


def _paced(hook: Hook, wait: Callable[[], None]) -> Hook:
    """Return a hook that is called with the last gradient, and waits for the pace before it sends."""

    def send(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        wait()
        return hook(state, bucket)

    return send

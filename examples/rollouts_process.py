"""A rollout process of rollouts.py, which follows the policy and samples with it, and the set of them."""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Self

import torch
from rollouts_policy import Episodes, Policy, sample
from torch import nn

import psclient

SILENCE_SECONDS = 120.0  # processes that say nothing for so long are taken for lost


class Batch(NamedTuple):
    """Episodes, and what the process that made them has received of the policy since it began.

    Attributes:
        episodes: of one version of the policy.
        cuts: versions that were received; newer ones replace those that were missed.
        fetched_bytes: of all of them.
    """

    episodes: Episodes
    cuts: int
    fetched_bytes: int


class Last(NamedTuple):
    """The last message of a process: the digest of the last version, as it has it."""

    digest: str


class ProcessLostError(Exception):
    """A rollout process has ended early, or none says anything; the message says which."""


def roll_out(server: str, name: str, seed: int, trainer: Connection) -> None:
    """Follow the policy, and send a batch for each answer of the trainer, until it answers with the last version."""
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    torch.set_num_threads(1)  # the processes share the cores
    torch.manual_seed(seed)
    policy, versions = Policy().bfloat16(), list[int]()
    last_version: int | None = None
    with psclient.follow(server, policy, name=name, on_cut=lambda cut: versions.append(cut.version)) as follower:
        while last_version is None:
            with follower.hold(SILENCE_SECONDS) as cut:  # one whole version until the end of the block
                episodes = sample(policy, cut.version)
            trainer.send(Batch(episodes, len(versions), follower.fetched_bytes))
            last_version = trainer.recv()
        with follower.at_least(last_version, SILENCE_SECONDS):
            trainer.send(Last(digest_of(policy)))


def _end_with_trainer() -> None:
    """Leave no process behind if the trainer was killed."""
    process = multiprocessing.parent_process()
    if process is not None:
        process.join()
        os._exit(1)


def digest_of(module: nn.Module) -> str:
    """Return the SHA-256 of the bits of a module's tensors."""
    hashed = hashlib.sha256()
    for tensor in module.state_dict().values():
        hashed.update(tensor.view(torch.uint8).numpy())
    return hashed.hexdigest()


class Rollouts:
    """Rollout processes, each with a pipe to this one; none outlives the ``with`` block.

    A pipe has one writer. Several writers of a ``multiprocessing.Queue`` share a lock, and a process that is killed
    while it has the lock stops the others.
    """

    def __init__(self, server: str, seed: int) -> None:
        self._server, self._seed = server, seed
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[str, BaseProcess] = {}
        self._pipes: dict[Connection, str] = {}
        self._killed: set[str] = set()

    def start(self, name: str) -> None:
        mine, theirs = self._context.Pipe()
        seed = 1000 * self._seed + len(self._processes)
        process = self._context.Process(target=roll_out, args=(self._server, name, seed, theirs), daemon=True)
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for the trainer to handle
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, on_interrupt)
        theirs.close()
        self._processes[name], self._pipes[mine] = process, name

    def kill(self, name: str) -> None:
        """Kill a process (SIGKILL) without asking the others."""
        self._killed.add(name)
        self._processes[name].kill()

    def messages(self) -> Iterator[tuple[str, Connection, Batch | Last]]:
        """Yield each message with its process's name and pipe, until all processes have sent their last one.

        Raises:
            ProcessLostError: a process ended early that nobody has killed here, or none says anything.
        """
        while self._pipes:
            ready = wait(list(self._pipes), SILENCE_SECONDS)
            if not ready:
                raise ProcessLostError(f"no rollout process has said anything for {SILENCE_SECONDS:.0f} s")
            for pipe in [pipe for pipe in self._pipes if pipe in ready]:  # each in its turn
                name = self._pipes[pipe]
                try:
                    message = pipe.recv()
                except (EOFError, ConnectionError):
                    if name not in self._killed:
                        raise ProcessLostError(f"{name} has ended early; its message is above") from None
                    del self._pipes[pipe]
                    continue
                if isinstance(message, Last):
                    del self._pipes[pipe]
                yield name, pipe, message

    def answer(self, pipe: Connection, last_version: int | None = None) -> None:
        """Ask for one more batch, or say which version is the last."""
        with suppress(ConnectionError):  # messages() says who has ended
            pipe.send(last_version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

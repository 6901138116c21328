"""Reinforcement learning over a feed: a trainer publishes its policy, and rollout processes follow it and sample.

The policy learns to sort digits from the reward alone. The trainer (this process) publishes a bfloat16 copy after each
step. Three rollout processes follow it; one of them is killed on the way, and a fourth joins late. Results go to
runs/rollouts (quick: runs/rollouts-quick): summary.json and rewards.png.

rollouts_process.py has the loop of a rollout process, and rollouts_policy.py the task, the policy and the loss.
"""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

if importlib.util.find_spec("matplotlib") is None:
    sys.exit("this example needs matplotlib: pip install -c constraints.txt '.[quickstart]'")

import rollouts_display as display
import torch
from rich.console import Console
from rich.filesize import decimal
from rollouts_display import MEAN_OF, Event, History, Reader, Step
from rollouts_policy import Policy, loss_of
from rollouts_process import Last, ProcessLostError, Rollouts, digest_of

import psclient

STEPS, QUICK_STEPS = 400, 60
KILL_AT, START_AT = 0.2, 0.25  # of the steps
FIRST, KILLED, LATE = ("rollout-0", "rollout-1", "rollout-2"), "rollout-1", "rollout-3"
LEAST_REWARD, QUICK_RISE = 0.9, 0.1  # at the end; quick: so much above the first rewards
LATE_BATCHES = 5  # which the late process makes, however fast the others are
MOST_LAG = 20  # versions; older batches are dropped
CUT_SECONDS = 0.005  # between versions that readers get: a step takes milliseconds here


def train(
    policy: Policy, steps: int, publisher: psclient.Publisher, rollouts: Rollouts, shown: display.Display
) -> dict[str, str]:
    """Train the policy, and publish it after each step; return digests of its last version, by the process that has it.

    The trainer's own is under ``trainer``. It makes more steps if the late process has not made its batches yet.
    """
    history, copy = shown.history, Policy().bfloat16()
    copy.load_state_dict(policy.state_dict())  # rounds to bfloat16
    published = publisher.publish(copy)
    for name in FIRST:
        rollouts.start(name)
        history.readers[name] = Reader()

    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3, eps=1e-4)  # noise in small gradients moves little
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    digests = {}
    for name, pipe, message in rollouts.messages():
        if isinstance(message, Last):
            digests[name] = message.digest
            continue
        lag = published.version - message.episodes.version
        if name == LATE and history.readers[name].first is None:
            history.events.append(Event(name, "joined", published.version))
        history.readers[name].take(message, lag)
        if len(history.steps) >= steps and len(history.readers[LATE].lags) >= LATE_BATCHES:
            rollouts.answer(pipe, last_version=published.version)
            continue
        rollouts.answer(pipe)  # the process samples on while this one trains
        if lag > MOST_LAG:
            history.dropped += 1
            continue

        optimizer.zero_grad()
        loss_of(policy, message.episodes).backward()
        optimizer.step()
        schedule.step()
        copy.load_state_dict(policy.state_dict())
        published = publisher.publish(copy)

        history.steps.append(Step(published.version, float(message.episodes.rewards.mean()), lag, published.nbytes))
        if len(history.steps) == int(KILL_AT * steps):
            rollouts.kill(KILLED)
            history.readers[KILLED].state = "killed"
            history.events.append(Event(KILLED, "killed", published.version))
        if len(history.steps) == int(START_AT * steps):
            rollouts.start(LATE)
            history.readers[LATE] = Reader()
            history.events.append(Event(LATE, "started", published.version))
        shown.update()
    return digests | {"trainer": digest_of(copy)}


def faults_of(history: History, digests: dict[str, str], quick: bool) -> list[str]:
    """Return the faults of the run, in sentences."""
    faults = []
    began, ended = history.reward(MEAN_OF), history.reward()
    if ended < (began + QUICK_RISE if quick else LEAST_REWARD):
        faults.append(f"the reward was {began:.2f} at the beginning and is {ended:.2f}")
    for name in [name for name in history.readers if name != KILLED]:
        if digests.get(name) != digests["trainer"]:
            faults.append(f"{name} does not have the trainer's last version, bit for bit")
    late = history.readers[LATE].first
    started = next(event.version for event in history.events if event.name == LATE)
    if late is None or late.episodes.version < started:
        faults.append(f"{LATE} did not begin with a version from after its start ({started})")
    return faults


def summary(
    options: argparse.Namespace, history: History, digests: dict[str, str], seconds: float, faults: list[str]
) -> dict[str, Any]:
    lags = [step.lag for step in history.steps]
    return {
        "reward": {"first": history.reward(MEAN_OF), "last": history.reward(), "mean_of_batches": MEAN_OF},
        "versions": history.steps[-1].version,
        "lag_versions": {"mean": fmean(lags), "median": median(lags), "most": max(lags)},
        "bytes_per_version": {
            "dense": history.dense_bytes,
            "published": fmean(step.nbytes for step in history.steps),
            "received": {name: reader.bytes_per_version for name, reader in history.readers.items()},
        },
        "dropped_batches": history.dropped,
        "events": [event._asdict() for event in history.events],
        "steps": [step._asdict() for step in history.steps],
        "digests": digests,
        "seconds": round(seconds, 1),
        "faults": faults,
        "seed": options.seed,
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "torch": torch.__version__},
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def words(history: History, seconds: float) -> str:
    published, dense = fmean(step.nbytes for step in history.steps), history.dense_bytes
    lags = [step.lag for step in history.steps]
    return (
        f"The reward went from {history.reward(MEAN_OF):.2f} to {history.reward():.2f} in {len(lags)} steps and "
        f"{seconds:.0f} s.\nA dense copy has {decimal(dense)}; the trainer sent {published / dense:.1%} of it a "
        f"version.\nBatches were made by policies that were {fmean(lags):.1f} versions old ({max(lags)} at most)"
        f"{f'; {history.dropped} more were older than {MOST_LAG} and dropped' if history.dropped else ''}."
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"of the trainer (default: {STEPS}; quick: {QUICK_STEPS})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of policy and episodes (default: 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/rollouts (quick: runs/rollouts-quick)")
    parser.add_argument("--quick", action="store_true", help="few steps; the reward must only rise")
    options = parser.parse_args()
    options.steps = options.steps if options.steps is not None else QUICK_STEPS if options.quick else STEPS
    options.out = options.out or Path("runs") / ("rollouts-quick" if options.quick else "rollouts")
    if options.steps < 2 * MEAN_OF:
        parser.error(f"--steps: at least {2 * MEAN_OF}")
    return options


def main() -> int:
    options, console, began = parse(), Console(), time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    policy = Policy()
    history = History(dense_bytes=2 * sum(parameter.numel() for parameter in policy.parameters()))
    try:
        with (
            display.Display(history, options.steps, console) as shown,
            psclient.LocalServer(run_id="policy", cut_seconds=CUT_SECONDS) as server,
            psclient.Publisher(server.server) as publisher,
            Rollouts(server.server, options.seed) as rollouts,
        ):
            digests = train(policy, options.steps, publisher, rollouts, shown)
    except KeyboardInterrupt:
        print("interrupted; the rollout processes and the server are stopped", file=sys.stderr)
        return 130
    except (ProcessLostError, psclient.errors.SparsepsError) as error:
        print(f"rollouts: {error}", file=sys.stderr)
        return 1
    seconds, faults = time.monotonic() - began, faults_of(history, digests, options.quick)
    options.out.mkdir(parents=True, exist_ok=True)
    written = options.out / "summary.json", options.out / "rewards.png"
    written[0].write_text(json.dumps(summary(options, history, digests, seconds, faults), indent=2) + "\n")
    display.plot(history, written[1])
    console.print(display.final_table(history))
    print(f"wrote {written[0]} and {written[1]}\n{words(history, seconds)}")
    for fault in faults:
        print(f"FAILED: {fault}")
    if not faults:
        print(f"All processes have the trainer's last version, bit for bit: SHA-256 {digests['trainer'][:16]}….")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

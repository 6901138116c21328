"""examples/rollouts.py as a user runs it: real processes, of which one is killed and one joins late."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import rollouts
import torch
from rollouts_display import Event, History, Reader, Step
from rollouts_policy import BLANK, DIGITS, GROUP, PLACES, Episodes, Policy, loss_of, sample
from rollouts_process import Batch

from tests.system.tools import wait_until

SCRIPT = Path(rollouts.__file__)
HANG_SECONDS = 600
"""Nothing here takes so long: a slow machine may take what it needs, and what hangs is ended all the same."""

pytestmark = pytest.mark.timeout(3 * HANG_SECONDS)


@contextmanager
def started(out, *options):
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(SCRIPT), "--out", str(out), *options]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=HANG_SECONDS)


def descendants(process):
    """Read the output until the trainer has made a step; return all processes of the run."""
    for line in process.stdout:
        if line.startswith("step "):
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError("the run has ended before its first step")


def all_gone(processes):
    wait_until(lambda: not any(each.is_running() and each.status() != "zombie" for each in processes), HANG_SECONDS)


@pytest.mark.long
def test_the_short_form_does_and_checks_everything(tmp_path):
    with started(tmp_path / "out", "--quick") as process:
        output = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == 0, output
    assert "bit for bit" in output
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(event["name"], event["what"]) for event in found["events"]] == [
        ("rollout-1", "killed"),
        ("rollout-3", "started"),
        ("rollout-3", "joined"),
    ]
    assert found["digests"].keys() == {"rollout-0", "rollout-2", "rollout-3", "trainer"}
    assert len({*found["digests"].values()}) == 1
    assert [step["version"] for step in found["steps"]] == [*range(1, len(found["steps"]) + 1)]
    assert len(found["steps"]) >= rollouts.QUICK_STEPS
    assert all(0 <= step["lag"] <= rollouts.MOST_LAG for step in found["steps"])
    assert found["faults"] == []
    assert (tmp_path / "out" / "rewards.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_ctrl_c_stops_everything(tmp_path):
    with started(tmp_path / "out", "--steps", "1000000") as process:
        children = descendants(process)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=HANG_SECONDS)[0]
        all_gone(children)
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert "Traceback" not in output


def test_a_killed_trainer_leaves_nobody_behind(tmp_path):
    with started(tmp_path / "out", "--steps", "1000000") as process:
        children = descendants(process)
        process.kill()
        all_gone(children)


@pytest.mark.long
def test_a_rollout_process_that_nobody_should_have_killed_ends_the_run(tmp_path):
    with started(tmp_path / "out", "--steps", "1000000") as process:
        children = descendants(process)
        readers = [each for each in children if "psservice" not in " ".join(each.cmdline()) and each.num_threads() > 1]
        readers[0].kill()
        output = process.communicate(timeout=HANG_SECONDS)[0]
        all_gone(children)
    assert process.returncode == 1
    assert "has ended early" in output


def history_of(rewards, first_version=50):
    history = History(dense_bytes=1000)
    history.steps = [Step(version + 1, reward, 0, 100) for version, reward in enumerate(rewards)]
    history.events = [Event("rollout-3", "started", 50), Event("rollout-3", "joined", 60)]
    history.readers = {name: Reader() for name in (*rollouts.FIRST, rollouts.LATE)}
    history.readers[rollouts.LATE].first = Batch(Episodes(*[torch.zeros(1).numpy()] * 3, first_version), 1, 1000)
    return history


def test_what_is_not_as_it_should_be_is_found():
    risen = [0.1] * 20 + [0.95] * 20
    same = dict.fromkeys(["rollout-0", "rollout-2", "rollout-3", "trainer"], "digest")
    assert rollouts.faults_of(history_of(risen), same, quick=False) == []
    (fault,) = rollouts.faults_of(history_of([0.1] * 40), same, quick=True)
    assert "reward" in fault
    (fault,) = rollouts.faults_of(history_of([0.1] * 20 + [0.5] * 20), same, quick=False)
    assert "reward" in fault
    assert rollouts.faults_of(history_of([0.1] * 20 + [0.5] * 20), same, quick=True) == []
    (fault,) = rollouts.faults_of(history_of(risen), same | {"rollout-2": "another"}, quick=False)
    assert "rollout-2" in fault
    del same["rollout-3"]
    (fault,) = rollouts.faults_of(history_of(risen), same, quick=False)
    assert "rollout-3" in fault
    (fault,) = rollouts.faults_of(history_of(risen, first_version=49), same | {"rollout-3": "digest"}, quick=False)
    assert "50" in fault


def test_episodes_are_what_the_policy_writes_and_the_reward_is_the_share_of_digits_in_their_place():
    policy = Policy(width=16)
    episodes = sample(policy, 7)
    text, logp = torch.from_numpy(episodes.text), torch.from_numpy(episodes.logp)
    assert episodes.version == 7
    assert text.shape == (len(logp), 2 * PLACES)
    assert text.max() < DIGITS == BLANK
    expected = [
        sum(a == b for a, b in zip(row[PLACES:], sorted(row[:PLACES]), strict=True)) / PLACES for row in text.tolist()
    ]
    assert episodes.rewards.tolist() == pytest.approx(expected)
    last = text.clone()
    last[:, -1] = BLANK
    found = policy(last).log_softmax(-1).gather(1, text[:, -1:])[:, 0]
    assert torch.allclose(found, logp[:, -1])


def test_the_loss_makes_better_answers_more_likely():
    policy = Policy(width=16)
    prompt, right, wrong = [2, 1, 0], [0, 1, 2], [5, 6, 7]
    text = torch.tensor(
        [prompt + (right if row == 0 else wrong) for row in range(GROUP)], dtype=torch.int64, device="cpu"
    )
    rewards = torch.tensor([1.0] + [0.0] * (GROUP - 1), dtype=torch.float32, device="cpu")

    def logp_of_right():
        written = torch.tensor([*prompt, BLANK, BLANK, BLANK], dtype=torch.int64, device="cpu")
        return policy(written.unsqueeze(0)).log_softmax(-1)[0, right[0]].item()

    with torch.no_grad():
        before = torch.empty(GROUP, PLACES, dtype=torch.float32, device="cpu")
        for place in range(PLACES):
            prefix = text.clone()
            prefix[:, PLACES + place :] = BLANK
            before[:, place] = policy(prefix).log_softmax(-1).gather(1, text[:, PLACES + place, None])[:, 0]
    likely = logp_of_right()
    loss = loss_of(policy, Episodes(text.numpy(), before.numpy(), rewards.numpy(), 0))
    loss.backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= 0.01 * parameter.grad
    assert logp_of_right() > likely

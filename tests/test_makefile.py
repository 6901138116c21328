"""What ``make`` would do, as it says itself with ``--dry-run``."""

import os
import re
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path

import pytest

from tools import smoke

ROOT = Path(__file__).parent.parent


def planned(target, venv, *variables):
    command = ["make", "--dry-run", target, f"VENV={venv}", *variables]
    of_make = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ARGS", "LONG"}  # the tests may be run by `make test ARGS=…`
    environment = {name: value for name, value in os.environ.items() if name not in of_make}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return run.stdout


@cache
def flags_of(module):
    """What the help of a program says."""
    command = [sys.executable, "-m", module, "--help"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


PROGRAMS = (
    *("examples", "container-test", "fuzz-service", "simulate", "chaos", "soak"),
    *("bench", "gpu", "scale", "compare", "evidence", "rivals"),
)


@pytest.mark.parametrize("target", PROGRAMS)
def test_the_program_behind_a_target_begins_and_knows_the_flags_that_it_is_given(target, tmp_path):
    plan = planned(target, tmp_path / "venv", "QUICK=1")
    (command,) = [line for line in plan.splitlines() if re.search(r"python3? -m (?!pip|venv)", line)]
    module, *flags = re.findall(r"-m (\S+)", command) + re.findall(r"--[a-z-]+", command)
    assert not [flag for flag in flags if flag not in flags_of(module)]


def test_every_target_has_a_smallest_form_that_ci_runs_or_is_run_whole_by_ci(tmp_path):
    assert sorted([*smoke.FORMS, *smoke.WHOLE]) == sorted(smoke.targets())
    script = (ROOT / ".ci" / "run").read_text()
    assert "tools.smoke" in script
    names = {"lint": "make .* lint$", "docs": "make .* docs$", "examples": "make .* examples QUICK=1$"}
    names |= {"test": "make .* test LONG=1 ", "container-test": "tools.container_test"}
    assert [name for name, runs in names.items() if not re.search(runs, script, re.MULTILINE)] == []
    assert names.keys() | {"smoke"} == smoke.WHOLE.keys()


@pytest.mark.parametrize("target", smoke.FORMS)
def test_the_smallest_form_of_a_target_gives_its_program_flags_that_it_knows(target, tmp_path):
    given = [word for word in smoke.command(target) if word != "--no-print-directory"]
    plan = planned(*given[1:2], tmp_path / "venv", *given[2:])
    for command in [line for line in plan.splitlines() if re.search(r"python3? -m (?!pip|venv)", line)]:
        module, *flags = re.findall(r"-m (\S+)", command) + re.findall(r" (--[a-z-]+)", command)
        assert [flag for flag in flags if flag not in flags_of(module)] == []
        for chosen in re.findall(r"--only ([a-z ]+?)(?: --|$)", command):
            assert set(chosen.split()) <= set(re.findall(r"[a-z_-]+", flags_of(module)))


def test_a_form_that_fails_fails_and_one_that_cannot_run_here_is_skipped(monkeypatch):
    def ended(script):
        monkeypatch.setattr(smoke, "command", lambda target, variables: ["bash", "-c", script])
        return smoke.run("help", [])

    assert ended("echo well") == ("passed", "well\n")
    assert ended("echo bad; exit 2")[0] == "FAILED"
    assert ended("echo 'make: *** [Makefile:1: rivals] Error 77'; exit 2")[0] == "skipped"


def test_the_quickstart_installs_what_it_needs_and_not_the_tools_of_developers(tmp_path):
    plan = planned("quickstart", tmp_path / "venv")
    assert "'.[quickstart]'" in plan
    assert "[dev]" not in plan
    assert "[dev]" in planned("test", tmp_path / "venv")


def test_long_tests_are_run_if_it_is_asked_for(tmp_path):
    for variables, is_given in (((), False), (("LONG=1",), True)):
        assert ("--long" in planned("test", tmp_path / "venv", *variables)) == is_given


def test_an_interpreter_that_did_not_make_the_environment_is_refused(tmp_path):
    venv.create(tmp_path / "made", symlinks=True)
    for python, is_refused in ((sys.executable, False), ("/bin/false", True)):
        command = ["make", "--dry-run", "quickstart", f"VENV={tmp_path / 'made'}", f"PYTHON={python}"]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (answer.returncode != 0, f"PYTHON={python}" in answer.stderr) == (is_refused, is_refused)


def test_installing_shows_what_it_does(tmp_path):
    installs = [line for line in planned("test", tmp_path / "venv").splitlines() if " install " in line]
    assert len(installs) == 3
    assert not [line for line in installs if "--quiet" in line]

"""``make examples`` finds out what it says it does: with a script that is quick to train, and several that lie."""

import json

import psutil
import pytest

from tools import run_examples
from tools.run_examples import Example
from tools.run_loops import Loop

TRAINING = """
import argparse, json, subprocess, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("--out", "--evaluate"):
    parser.add_argument(name, type=Path)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--lie", default="")
options = parser.parse_args()
if options.evaluate:
    sys.exit(0 if options.evaluate.exists() else 1)
options.out.mkdir(parents=True, exist_ok=True)


def report(kind, version, **figures):
    with (options.out / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"kind": kind, "epoch": 1, "version": version, **figures}) + "\\n")


if not options.resume:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (options.out / "child").write_text(str(child.pid))
    if options.lie == "ends early":
        sys.exit(3)
    report("train", 5)
    report("test", 8, accuracy=0.5)
    time.sleep(600)
if options.lie == "begins anew":
    report("train", 1)
report("test", 12, accuracy=0.4 if options.lie == "unlearned" else 0.9)
if options.lie != "saves nothing":
    (options.out / "model.safetensors").write_text("")
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "training.py").write_text(TRAINING)
    (tmp_path / "scripts" / "plain.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    monkeypatch.setattr(run_examples, "EXAMPLES", tmp_path / "scripts")
    return tmp_path / "out"


def training(lie=""):
    return Example("it", ("training.py", "--lie", lie), "accuracy", least=0.8, evaluate=("--lie", lie))


def test_a_training_is_killed_whole_resumed_and_judged(scripts):
    scripts.mkdir()
    result = run_examples.run(training(), scripts)
    assert (result.failure, result.killed_at, result.resumed_at, result.figure) == ("", 8, 12, "accuracy 0.9")
    child = int((scripts / "it" / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("ends early", "ended with status 3 before its first test"),
        ("begins anew", "killed at version 8, and resumed at 1"),
        ("unlearned", "accuracy 0.4 is not from 0.8"),
        ("saves nothing", "ended with status 1"),
    ],
)
def test_a_training_that_lies_is_found_out(scripts, lie, words):
    scripts.mkdir()
    result = run_examples.run(training(lie), scripts)
    assert words in result.failure
    child = scripts / "it" / "child"
    if child.exists() and psutil.pid_exists(int(child.read_text())):
        psutil.Process(int(child.read_text())).kill()  # what ends by itself takes no child along


def test_the_whole_fails_where_one_does_and_says_so(scripts, monkeypatch, capsys):
    both = [Example("good", ("plain.py", "0")), Example("bad", ("plain.py", "4"))]
    monkeypatch.setattr(run_examples, "examples", lambda data, quick: both)
    monkeypatch.setattr(run_examples, "make_data", lambda out, quick: None)
    assert run_examples.main(["--out", str(scripts)]) == 1
    assert "FAILED: ended with status 4" in capsys.readouterr().out
    found = json.loads((scripts / "summary.json").read_text())
    assert [bool(each["failure"]) for each in found] == [False, True]
    assert run_examples.main(["--out", str(scripts), "--only", "good"]) == 0
    with pytest.raises(SystemExit):
        run_examples.main(["--only", "none"])


def test_a_loop_whose_library_is_not_installed_is_skipped_and_named(scripts, monkeypatch, capsys):
    loop = Loop("strange", ("plain.py",), "saved", ("no_such_package",))
    monkeypatch.setattr(run_examples, "examples", lambda data, quick: [Example("strange", ("plain.py",), loop=loop)])
    monkeypatch.setattr(run_examples, "make_data", lambda out, quick: None)
    assert run_examples.main(["--out", str(scripts)]) == 0
    (found,) = json.loads((scripts / "summary.json").read_text())
    assert found["skipped"] == "skipped: no_such_package not installed"
    assert "no_such_package" in capsys.readouterr().out

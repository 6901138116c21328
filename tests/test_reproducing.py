"""The commands of the reproduction page are ones that the programs take: page and options cannot drift apart."""

import importlib
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import bench
from benchmarks.ldte import __main__ as ldte_command
from benchmarks.scale.sweeps import PUBLISHED, PUBLISHED_WORKERS
from psclient.settings import ClientSettings
from psservice import settings as server_settings

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGES = ("reproducing.md", "ldte.md")
MODULES = {"benchmarks.bench": bench._parser, "benchmarks.ldte": ldte_command._parser}


def commands(page):
    """Return the words of every command in the page's console blocks and code spans, shell variables filled in."""
    text = (ROOT / "docs" / "evidence" / page).read_text()
    known, found = {}, []
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`((?:python -m benchmarks\.|psservice serve |python examples/|torchrun )[^`]*)`", text)
    for line in [*lines, *spans]:
        filled = re.sub(r"\$([A-Z]+[0-9]*)", lambda match: known[match[1]], line)
        assignment = re.fullmatch(r'([A-Z]+[0-9]*)="([^"]*)"', filled)
        if assignment:
            known[assignment[1]] = assignment[2]
        else:
            found.append(shlex.split(filled, comments=True))
    return found


COMMANDS = [command for page in PAGES for command in commands(page)]


def parse_example(name, arguments, monkeypatch):
    """Read a command line as the example does."""
    if not (EXAMPLES / f"{name}.py").exists():
        pytest.skip(f"examples/{name}.py is not there")
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return importlib.import_module(name).parse()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_command_is_one_that_its_program_takes(words, monkeypatch):
    while re.fullmatch(r"PSCLIENT_[A-Z_]+=.*", words[0]):
        assert words[0].partition("=")[0].removeprefix("PSCLIENT_").lower() in ClientSettings.model_fields
        words = words[1:]
    if words[0] == "export":
        assert (
            words[1].partition("=")[0].removeprefix("PSSERVICE_").lower() in server_settings.ServerSettings.model_fields
        )
    elif words[:2] == ["psservice", "serve"]:
        assert server_settings.load(words[2:]).listen
    elif words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words[1:])
        script = Path(options.training_script)
        given = parse_example(script.stem, options.training_script_args, monkeypatch)
        assert given.server
        assert given.workers is None  # each process of torchrun is one
    elif words[:2] == ["python", "-m"]:
        assert MODULES[words[2]]().parse_args(words[3:])
    else:
        assert words[0] == "python", words
        if words[1].startswith("examples/support/"):
            assert (ROOT / words[1]).exists()
        else:
            assert parse_example(Path(words[1]).stem, words[2:], monkeypatch).data


def test_there_is_a_command_for_every_published_row():
    """By script, workers and method."""
    rows = set()
    for words in commands("reproducing.md"):
        if words[0] == "torchrun" and "--method" in words:
            hosts = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
            processes = int(words[words.index("--nproc-per-node") + 1])
            script = next(Path(word).stem for word in words if word.endswith(".py"))
            rows.add((script, processes * hosts, words[words.index("--method") + 1]))
    methods = ("dgs", "dgc", "gradient-dropping", "asgd")
    expected = {("cifar10", workers, method) for workers in (1, 4, 8, 16, 32) for method in methods}
    expected |= {("imagenet", workers, method) for workers in (4, 16) for method in methods}
    assert rows == expected


def test_every_run_has_a_folder_of_its_own():
    folders = [words[words.index("--out") + 1] for words in commands("reproducing.md") if "--out" in words]
    assert len(set(folders)) == len(folders) > 20


def test_the_published_speedups_are_those_of_the_benchmark():
    text = (ROOT / "docs" / "evidence" / "reproducing.md").read_text()
    for rate, methods in PUBLISHED.items():
        for method, figures in methods.items():
            assert len(figures) == len(PUBLISHED_WORKERS)
            cells = " | ".join(f"{figure:.2f}" for figure in figures)
            assert f"| {method}, {rate / 1e9:.0f} Gbit/s, published | {cells} |" in text

"""What every test shares: a clean environment, one torch thread, and the reason for skipping CUDA tests."""

import gc
import importlib
import multiprocessing.util
import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import forkserver, tiers

if not torch.cuda.is_available():
    # Without a GPU, Triton's kernels run on the CPU in its interpreter. Triton asks for this when it is first imported,
    # for its own library too: so it is set before any test, and not in a fixture. Nothing else here uses Triton.
    os.environ["TRITON_INTERPRET"] = "1"

# A shell that puts the tests in its background has SIGINT ignored, and some tests interrupt themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

EXECUTE, SPAWN = subprocess.Popen, multiprocessing.util.spawnv_passfds

_JOB_VARIABLES = (
    *("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("SLURM_NTASKS", "SLURM_PROCID", "JOB_COMPLETION_INDEX"),
)


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run tests that are marked long, too")


def pytest_configure(config):
    """Run every test of a module or folder that is named. No test depends on speed."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        config.option.long = True
    tiers.is_long = config.option.long
    hypothesis.settings.register_profile("any machine", deadline=None, max_examples=tiers.examples(100))
    hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip long tests here, so that the list of skipped tests has one line for all of them."""
    if "long" in item.keywords and not item.config.getoption("long"):
        pytest.skip("long tests: `make test LONG=1` runs them, and so does naming their module")


def pytest_collection(session):
    """Load the modules of tests from another one on than the other processes of the run, which load all of them too.

    A process finds what the others have compiled meanwhile, instead of compiling all modules at the same time as they.
    """
    gc.disable()  # until everything is loaded
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    folders = [Path(given) for given in session.config.args]
    modules = sorted(module for folder in folders if folder.is_dir() for module in folder.rglob("test_*.py"))
    first = len(modules) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for module in modules[first:] + modules[:first]:
        if str(module.parent) not in sys.path:
            sys.path.insert(0, str(module.parent))
        with suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and tells of it
            importlib.import_module(module.stem)


def pytest_collection_finish():
    """Let the collector look no more at modules and tests: a test that calls it waits a second each time."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def forked_processes():
    """Processes of this interpreter that a test starts need not load torch again."""
    forkserver.use_own_ports()
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            forkserver.fork_from_here(patch.setattr)
        yield


@pytest.fixture(autouse=True)
def executed_processes(request, monkeypatch):
    """Tests of the start itself run a new interpreter."""
    if request.node.get_closest_marker("executes_python"):
        monkeypatch.setattr(subprocess, "Popen", EXECUTE)
        monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", SPAWN)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No setting or job variable of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith(("PSCLIENT_", "PSSERVICE_", "OTEL_")) or name in _JOB_VARIABLES:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def interruptible():
    """A command that a test runs in its own process leaves no signal handler to the tests behind it."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def determinism():
    """One thread and a fixed seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_collection_modifyitems(config, items):
    """Let each process begin with its share of the slow tests; skip CUDA tests without a device, and say so.

    A process first gets an equal part of the list, and may give away the end of it: a slow test that comes last is what
    all others wait for. Tests of one ``xdist_group`` have a fixture of many seconds: one process begins with all of
    them, or each that is given one would make the fixture again.
    """
    count, total = getattr(config, "workerinput", {}).get("workercount", 1), len(items)
    groups, slow, rest = {}, [], []
    for item in items:
        if group := item.get_closest_marker("xdist_group"):
            groups.setdefault(group.args[0], []).append(item)
        elif "slow" in item.keywords or ("long" in item.keywords and config.getoption("long")):
            slow.append(item)
        else:
            rest.append(item)
    items.clear()
    for number in range(count):
        items += chain(*list(groups.values())[number::count], slow[number::count])
        others = max(0, total * (number + 1) // count - len(items))
        items += rest[:others]
        rest = rest[others:]
    items += rest
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture
def yaml(tmp_path):
    """Write a settings file and return its path."""

    def write(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def start():
    """Servers in this process, over loopback all the same."""
    from psservice.process.server import Server
    from psservice.settings import ServerSettings

    def begin(**settings):
        ports = {"listen": "127.0.0.1:0", "health_listen": "", "metrics_listen": ""}
        values = ports | {"down_mode": "exact", "lease_seconds": 3600, "rpc_threads": 4} | settings
        running.append(Server(ServerSettings.model_validate(values)))
        return running[-1]

    running = []
    yield begin
    for server in running:
        server.settings = server.settings.model_copy(update={"drain_seconds": 0.0})
        server.stop()


@pytest.fixture
def server():
    """A server of this test alone, which answers exactly; a file that needs another has its own."""
    from psclient.rpc.local_server import LocalServer

    with LocalServer(down_mode="exact", lease_seconds=60) as running:
        yield running

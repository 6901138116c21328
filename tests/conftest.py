"""What every test shares: a clean environment, one torch thread, and the reason for skipping CUDA tests."""

import os
import signal
import sys

import pytest
import torch

import psclient.rpc.local_server
from tests.forkserver import ForkServer

if not torch.cuda.is_available():
    # Without a GPU, Triton's kernels run on the CPU in its interpreter. Triton asks for this when it is first imported,
    # for its own library too: so it is set before any test, and not in a fixture. Nothing else here uses Triton.
    os.environ["TRITON_INTERPRET"] = "1"

# A shell that puts the tests in its background has SIGINT ignored, and some tests interrupt themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

_JOB_VARIABLES = (
    *("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("SLURM_NTASKS", "SLURM_PROCID", "JOB_COMPLETION_INDEX"),
)


@pytest.fixture(autouse=True, scope="session")
def forked_servers():
    """Servers that a test itself starts need not load torch again; those of scripts begin as ever."""
    if sys.platform != "linux":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psclient.rpc.local_server, "spawn", ForkServer().spawn)
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No setting or job variable of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith(("PSCLIENT_", "PSSERVICE_", "OTEL_")) or name in _JOB_VARIABLES:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def determinism():
    """One thread and a fixed seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    """Skip CUDA tests where there is no device, and say so."""
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

"""Without the libraries of the extra ``[server]``: a worker imports, and the server says what to install."""

import subprocess
import sys

import pytest

from tests.tiers import long_but

pytestmark = pytest.mark.executes_python

MISSING = """
import sys
sys.modules.update(dict.fromkeys(("grpc_health", "grpc_reflection", "prometheus_client", "pythonjsonlogger")))
"""


def run(program):
    command = [sys.executable, "-c", MISSING + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    "words", long_but([["serve"]], [["serve"], ["health", "127.0.0.1:1"]]), ids=lambda words: words[0]
)
def test_a_server_says_what_to_install(words):
    answer = run(f"from psservice.cli.main import main; sys.exit(main({words!r}))")
    assert answer.returncode == 2
    assert "pip install 'sparseps[server]'" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.long
def test_a_worker_and_the_commands_for_running_servers_need_none_of_them():
    answer = run(
        "import psclient; from psservice.cli.main import main\n"
        "psclient.DGS, psclient.ElasticSampler, psclient.download\n"
        "sys.exit(main(['status', '127.0.0.1:1', '--timeout', '1']))"
    )
    assert answer.returncode == 1, answer.stderr
    assert "127.0.0.1:1" in answer.stdout + answer.stderr

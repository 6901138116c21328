"""TRL's protocol for weights, over HTTP, to engines that follow: some die, some come back, some fail."""

import json
import logging
import re
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError, EngineError
from psclient.integrations.trl import WeightTransfer
from psclient.integrations.vllm import register
from psclient.integrations.vllm_server import VllmServer
from tests.psclient.integrations import vllm_interface
from tests.psclient.integrations.vllm_http import VllmProcess
from tests.psclient.integrations.vllm_interface import PackedModel, checkpoint
from tests.system.publishing.publishing_tools import QUIET


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    vllm_interface.install(monkeypatch)
    register()


class Fleet:
    """Two servers of vLLM, the first one with two ranks, and a trainer that has them updated as TRL does."""

    def __init__(self, server):
        self.init_info = {"server": server.addresses, "seconds": 30}
        self.processes = [VllmProcess([PackedModel(rank, 2) for rank in range(2)]), VllmProcess([PackedModel()])]
        publisher = psclient.Publisher(server, settings=QUIET)
        servers = [VllmServer(process.url, self.init_info) for process in self.processes]
        self.transfer = WeightTransfer(publisher, servers, dtype=torch.bfloat16)
        self.policy = {name: tensor.float() for name, tensor in checkpoint().items()}
        self.changes = 0
        self.transfer.init_weight_transfer()

    def sync(self):
        """Train, and do what TRL does between steps."""
        self.policy["k_proj.weight"].view(-1)[self.changes : self.changes + 3].mul_(2)
        self.changes += 3
        self.transfer.pause()
        try:
            self.transfer.send_weights(iter(self.policy.items()))
        finally:
            self.transfer.resume()

    def has_newest(self, process):
        tensors = {name: tensor.bfloat16() for name, tensor in self.policy.items()}
        return all(model.holds(tensors) for model in process.models)

    def close(self):
        self.transfer.destroy()
        for process in self.processes:
            process.die()


@pytest.fixture
def fleet():
    with psclient.LocalServer(cut_seconds=0.01) as server:
        found = Fleet(server)
        yield found
        found.close()


def test_engines_have_each_version_and_its_name(fleet):
    for _ in range(3):
        fleet.sync()
        for process in fleet.processes:
            assert fleet.has_newest(process)
            assert not process.is_paused
            assert process.weight_version == fleet.transfer.published.weight_version
    assert [process.calls.count("/init_weight_transfer_engine") for process in fleet.processes] == [1, 1]
    assert all(model.reloads == 1 for process in fleet.processes for model in process.models)
    assert fleet.transfer.published.changed == 3


def test_an_engine_that_dies_holds_nobody_up_and_its_replacement_gets_the_newest_version(fleet, caplog):
    fleet.sync()
    dead = fleet.processes[1]
    dead.die()
    with caplog.at_level(logging.WARNING, "psclient"):
        fleet.sync()
    assert fleet.has_newest(fleet.processes[0])
    assert [record.message for record in caplog.records if "left out" in record.message] == [
        f"an engine is left out: {dead.url}: POST /pause?mode=keep was not answered by vLLM: "
        "ConnectionRefusedError(111, 'Connection refused')"
    ]
    fleet.processes[1] = new = VllmProcess([PackedModel()], dead.port)
    fleet.sync()
    assert fleet.has_newest(new)
    assert not new.is_paused
    assert new.weight_version == fleet.transfer.published.weight_version


def test_an_engine_that_fails_half_way_stays_paused_until_it_has_a_whole_version(fleet):
    fleet.sync()
    good, broken = fleet.processes
    before = broken.weight_version
    broken.models[0].fails = True
    fleet.sync()
    assert fleet.has_newest(good)
    assert not good.is_paused
    assert broken.is_paused
    assert broken.weight_version == before
    broken.models[0].fails = False
    fleet.sync()
    assert fleet.has_newest(broken)
    assert not broken.is_paused


def test_if_no_engine_takes_a_version_the_trainer_is_told(fleet):
    fleet.sync()
    for process in fleet.processes:
        process.models[0].fails = True
    with pytest.raises(EngineError, match="out of memory") as caught:
        fleet.sync()
    assert caught.value.url in {process.url for process in fleet.processes}
    assert all(process.is_paused for process in fleet.processes)


def test_if_a_version_cannot_be_published_the_engines_go_on_with_the_one_before(fleet):
    fleet.sync()
    version = fleet.transfer.published.weight_version
    fleet.transfer.pause()
    with pytest.raises(ConfigurationError):
        fleet.transfer.send_weights(iter([("another", torch.zeros(3))]))
    fleet.transfer.resume()
    for process in fleet.processes:
        assert not process.is_paused
        assert process.weight_version == version
    fleet.sync()
    assert all(fleet.has_newest(process) for process in fleet.processes)


def test_an_update_that_another_controller_never_finished_is_finished(fleet):
    fleet.sync()
    fleet.processes[0].is_updating = True
    fleet.sync()
    assert fleet.has_newest(fleet.processes[0])
    assert fleet.processes[0].models[0].reloads == 1


def test_without_engines_versions_are_published_for_whoever_follows():
    policy, module = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    with psclient.LocalServer(cut_seconds=0.01) as server, ExitStack() as stack:
        transfer = WeightTransfer(psclient.Publisher(server, settings=QUIET))
        stack.callback(transfer.destroy)
        transfer.pause()
        transfer.send_weights(policy.named_parameters())
        transfer.resume()
        with psclient.follow(server, module) as follower, follower.at_least(transfer.published.version, 60) as cut:
            assert cut.weight_version == transfer.published.weight_version
            assert torch.equal(module.weight, policy.weight)


def test_a_server_without_the_routes_says_how_to_start_it():
    process = VllmProcess([], in_dev_mode=False)
    try:
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            VllmServer(process.url, {}).update("run/0/1")
    finally:
        process.die()


def test_what_is_no_server_of_http_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EngineError, match="was not answered by vLLM"):
            VllmServer(url, {}).pause()
        thread.join()


@pytest.mark.parametrize(
    "url",
    [
        *("host:8000", "", "ftp://host", "http://", "http://me:secret@host", "http://host/?key=secret"),
        *("http://host:port", "http://host:99999", "http://[::1", "http://h\u00f6st"),
    ],
)
def test_an_engine_is_named_by_a_url(url):
    with pytest.raises(ConfigurationError, match="http://host:8000") as caught:
        VllmServer(url, {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("init_info", "says"),
    [({"directory": Path("policy")}, "as strings"), ({"settings": {"token": "secret"}}, "token_file")],
)
def test_what_workers_are_to_be_told_is_checked_before_it_is_sent(init_info, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        VllmServer("http://host:8000", init_info)
    assert "'secret'" not in str(caught.value)


def test_an_answer_that_never_ends_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def answer():
            with listener.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not over.wait(0.01):
                    with suppress(OSError):
                        connection.sendall(b"x")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(EngineError, match=r"timed out|time of the update is over"):
            VllmServer(url, {}, seconds=0.5).update("run/0/1")
        over.set()
        thread.join()


def test_an_engine_whose_following_has_ended_is_told_of_the_feed_again(fleet):
    fleet.sync()
    fleet.processes[1].engines[0]._follower.close()
    fleet.sync()
    assert all(map(fleet.has_newest, fleet.processes))
    assert fleet.processes[1].calls.count("/init_weight_transfer_engine") == 2


# The guide (engines.md)

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "engines.md").read_text()


def block(heading, number=0):
    """Return a block of Python of the guide, below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[number]


def at_home(source, server, process, directory):
    for written, here in {
        '"host:50051"': repr(server.server),
        '"http://host:8000"': repr(process.url),
        '"/var/cache/policy"': repr(str(directory)),
    }.items():
        source = source.replace(written, here)
    assert "host:" not in source
    return source


def test_the_guides_loop_for_vllm(tmp_path):
    policy = torch.nn.Module()
    for name, value in checkpoint().items():
        part = torch.nn.Module()
        part.register_parameter("weight", torch.nn.Parameter(value))
        policy.add_module(name.removesuffix(".weight"), part)

    def train(model, batch):
        with torch.no_grad():
            model.k_proj.weight.view(-1)[batch] += 1

    process = VllmProcess([PackedModel()])
    try:
        with psclient.LocalServer(cut_seconds=0.01) as server:
            names = {"batches": range(3), "model": policy, "train": train}
            exec(at_home(block("vLLM"), server, process, tmp_path), names)
        assert process.models[0].holds(dict(policy.named_parameters()))
        assert process.weight_version == names["published"].weight_version
        assert (tmp_path / "rank-0-0" / "model.safetensors.index.json").exists()
    finally:
        process.die()


class TrainerOfTrl:
    """Does with the weights what ``AsyncGRPOTrainer`` of TRL 1.16 does."""

    def __init__(self, model, train_dataset, reward_funcs, weight_transfer):
        self.policy = {name: tensor.float() for name, tensor in checkpoint().items()}
        self.weight_transfer = weight_transfer

    def train(self):
        self.weight_transfer.init_weight_transfer()
        for step in range(3):
            self.weight_transfer.pause()
            self.weight_transfer.send_weights(iter(self.policy.items()))
            self.weight_transfer.resume()
            self.policy["q_proj.weight"].view(-1)[step] += step < 2
        self.weight_transfer.destroy()


def test_the_guides_trainer_of_trl(monkeypatch, tmp_path):
    for name in ("trl", "trl.experimental", "trl.experimental.async_grpo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["trl.experimental.async_grpo"].AsyncGRPOTrainer = TrainerOfTrl
    process = VllmProcess([PackedModel()])
    try:
        with psclient.LocalServer(cut_seconds=0.01) as server:
            names = {"name": "policy", "dataset": [], "reward": len}
            exec(at_home(block("TRL"), server, process, tmp_path), names)
        policy = {name: tensor.bfloat16() for name, tensor in names["trainer"].policy.items()}
        assert process.models[0].holds(policy)
    finally:
        process.die()


def test_the_guides_callback_publishes_each_step():
    names = {}
    transformers = ModuleType("transformers")
    transformers.TrainerCallback = object
    with psclient.LocalServer() as server, psclient.Publisher(server, settings=QUIET) as publisher:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "transformers", transformers)
            exec(block("TRL", 1), names)
        callback, model = names["Publish"](publisher), torch.nn.Linear(3, 3)
        for _ in range(2):
            callback.on_step_end(None, None, None, model=model, optimizer=None)
            with torch.no_grad():
                model.weight[0, 0] += 1
        assert psclient.download(server)["weight"][0, 0] == model.weight[0, 0] - 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_guides_program_tells_an_engine_of_its_directory(tmp_path):
    told = []

    class Sglang(BaseHTTPRequestHandler):
        def do_POST(self):
            told.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Sglang) as http, psclient.LocalServer() as server:
        thread = threading.Thread(target=http.handle_request)
        thread.start()
        with psclient.Publisher(server, settings=QUIET) as publisher:
            version = publisher.publish(checkpoint()).weight_version
            script = tmp_path / "reload"
            source = re.search(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
            script.write_text(source.replace("127.0.0.1:30000", f"127.0.0.1:{http.server_address[1]}"))
            script.chmod(0o755)
            out = tmp_path / "policy"
            command = ["follow", server.server, "--out", str(out), "--once", "--exec", str(script)]
            done = subprocess.run([sys.executable, "-m", "psclient", *command], timeout=100)
        thread.join()
    assert done.returncode == 0
    assert told == [("/update_weights_from_disk", {"model_path": str(out), "weight_version": version})]

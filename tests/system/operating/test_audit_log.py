"""``--audit-log``: operators' and refused calls in a file of their own, also while that file is moved or cannot be."""

import json
import os
import shutil
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import grpc
import pytest

from psclient import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.cli.main import main
from tests.system.serving import serving
from tests.system.tools import wait_until


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "tokens").write_text("admin an-admins-secret\nreader a-readers-secret\n")
    return {"tokens": tmp_path / "tokens", "audit_log": tmp_path / "logs" / "audit", "data_dir": tmp_path / "data"}


@pytest.fixture
def admin(monkeypatch):
    monkeypatch.setenv("PSCLIENT_TOKEN", "an-admins-secret")


def test_operators_calls_and_refused_ones_are_in_the_file_whatever_the_level_of_the_log(
    settings, admin, monkeypatch, tmp_path
):
    path, log = settings["audit_log"], tmp_path / "log"
    path.parent.mkdir()
    with log.open("w") as stream, LocalServer(log_to=stream, log_level="error", **settings) as server:
        assert main(["drain", server.addresses[0]]) == 0
        assert main(["drain", "--undo", server.addresses[0]]) == 0
        monkeypatch.setenv("PSCLIENT_TOKEN", "a-readers-secret")
        assert main(["drain", server.addresses[0]]) == 3
        monkeypatch.setenv("PSCLIENT_TOKEN", "an-unknown-secret")
        assert main(["status", server.addresses[0]]) == 3
    found = [{"act": None, "role": None, **line} for line in lines_of(path) if line["rpc"] != "TakeSnapshot"]
    assert [(each["rpc"], each["act"], each.get("outcome") or each["reason"], each["role"]) for each in found] == [
        ("Drain", "close", "OK", "admin"),
        ("Drain", "open", "OK", "admin"),
        ("Drain", None, "PERMISSION_DENIED", "reader"),
        *[("GetStatus", None, "UNAUTHENTICATED", None)] * 2,  # `status` asks who is there, and then each
    ]
    for line in found:
        time = datetime.fromisoformat(line["time"])
        assert time.utcoffset() == timedelta(0)
        assert abs(time - datetime.now(UTC)) < timedelta(hours=1)
        assert line["peer"].startswith("ipv4:127.0.0.1:")
        assert line["token"].startswith("sha256:")
    assert "secret" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert log.read_text() == ""


def test_a_moved_file_is_followed_by_a_new_one_and_a_folder_that_is_gone_is_told_of(settings, admin, tmp_path):
    path, log = settings["audit_log"], tmp_path / "log"
    path.parent.mkdir()
    with log.open("w") as stream, LocalServer(log_to=stream, log_format="json", **settings) as server:

        def evict(name):
            assert main(["evict", name, server.addresses[0]]) == 3

        def names_in(file):
            return [line["worker"] for line in lines_of(file)]

        evict("first")
        wait_until(lambda: names_in(path) == ["first"])
        path.rename(path.with_suffix(".1"))
        evict("second")
        wait_until(lambda: names_in(path) == ["second"])
        assert names_in(path.with_suffix(".1")) == ["first"]
        shutil.rmtree(path.parent)
        for _ in range(5):
            evict("third")
        wait_until(lambda: "the audit log cannot be written" in log.read_text())
        assert main(["status", server.addresses[0]]) == 0
        path.parent.mkdir()
        evict("fourth")
        wait_until(lambda: names_in(path) == ["fourth"])
    told = [json.loads(line) for line in log.read_text().splitlines() if "cannot be written" in line]
    assert [(line["level"], line["file"]) for line in told] == [("ERROR", str(path))]


def test_a_flood_of_refused_calls_fills_no_disk(settings):
    path = settings["audit_log"]
    path.parent.mkdir()
    with LocalServer(**settings) as server, grpc.insecure_channel(server.addresses[0]) as channel:
        stub = ParameterServerServiceStub(channel)
        for _ in range(150):
            with pytest.raises(grpc.RpcError) as refused:
                stub.GetStatus(pb.GetStatusRequest(), timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    found = lines_of(path)
    assert 100 <= len(found) < 150
    assert all(line["reason"] == "UNAUTHENTICATED" for line in found)


def test_a_file_that_cannot_be_opened_ends_the_start(settings):
    flags = [f"--audit-log={settings['audit_log']}", "--health-listen=", "--metrics-listen=", "--listen=127.0.0.1:0"]
    command = [sys.executable, "-m", "psservice", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert f"--audit-log {settings['audit_log']} cannot be opened: No such file or directory" in done.stderr


def test_the_shards_of_a_command_share_the_file_and_each_line_has_its_shard(settings, admin, tmp_path):
    settings["audit_log"].parent.mkdir()
    del settings["data_dir"]
    with serving(tmp_path / "log", **settings, metrics_listen="") as server:
        addresses = [server.address_of(shard) for shard in range(3)]
        assert main(["evict", "nobody", *addresses]) == 3
        wait_until(lambda: len(lines_of(settings["audit_log"])) == 3)
    assert {line["shard"] for line in lines_of(settings["audit_log"])} == {0, 1, 2}


def test_a_dash_is_stdout(settings, admin):
    settings["audit_log"] = "-"
    read_end, write_end = os.pipe()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    flags += ["--health-listen=", "--metrics-listen=", "--listen=127.0.0.1:0", f"--ready-fd={write_end}"]
    command = [sys.executable, "-m", "psservice", "serve", *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    server = subprocess.Popen(command, pass_fds=[write_end], **streams)
    try:
        os.close(write_end)
        with os.fdopen(read_end) as ready:
            address = json.loads(ready.readline())["address"]
        assert main(["drain", address]) == 0
    finally:
        server.terminate()
        out, _ = server.communicate(timeout=60)
    (line,) = map(json.loads, out.splitlines())
    assert (line["rpc"], line["act"]) == ("Drain", "close")

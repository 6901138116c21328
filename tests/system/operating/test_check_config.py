"""``serve --check-config`` finds what would keep a server from its start, and changes nothing."""

import datetime
import logging
import os
import socket
import sys
import threading

import pytest
import torch
import trustme

import psclient
from psclient import LocalServer
from psclient.settings import ClientSettings
from psservice.cli.main import main
from tests.certificates import dns, write
from tests.system.serving import ports_in_a_row

PORTS = ("--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", "--health-listen=")


@pytest.fixture(autouse=True)
def log_as_before(monkeypatch):
    """The command has the log of its process to itself; here other tests use that too."""
    for module, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, name, getattr(module, name))
    root, calls = logging.getLogger(), logging.getLogger("grpc._common")
    before = [*root.handlers], root.level, calls.level
    yield
    logging.captureWarnings(False)
    root.handlers[:], level, of_calls = before
    root.setLevel(level)
    calls.setLevel(of_calls)


def check(capsys, *flags):
    capsys.readouterr()
    code = main(["serve", "--check-config", *PORTS, *map(str, flags)])
    return code, capsys.readouterr().out


def faults(text):
    return [line.split(maxsplit=2)[1:] for line in text.splitlines() if line.startswith("fault")]


@pytest.fixture
def secured(tmp_path):
    files = write(trustme.CA(), tmp_path, "server", dns("localhost"))
    (tmp_path / "tokens").write_text("admin a-secret\nworker another-secret\nworker a-third-secret\n")
    (tmp_path / "roles").write_text("shard psservice\nreader a-reader\n")
    return [
        f"--tls-cert={files['tls_cert']}",
        f"--tls-key={files['tls_key']}",
        f"--tls-client-ca={files['tls_ca']}",
        f"--tokens={tmp_path / 'tokens'}",
        f"--certificate-roles={tmp_path / 'roles'}",
    ]


def test_what_would_start_is_told_and_nothing_is_made(secured, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    data = tmp_path / "new" / "data"
    code, text = check(capsys, *secured, f"--data-dir={data}", f"--audit-log={tmp_path / 'audit'}", "--run-id=mine")
    assert code == 0, text
    assert text.splitlines()[-1] == "the server would start"
    for word in (
        "run_id=mine",
        "1 of role admin, 2 of role worker",
        "1 of role reader, 1 of role shard",
        "is valid until",
        f"{data / 'shard-0-of-1'}: begins empty",
        "--health-listen is off",
    ):
        assert word in text
    assert "secret" not in text
    assert sorted(tmp_path.rglob("*")) == before


def test_each_fault_is_told_and_all_of_them_at_once(secured, tmp_path, capsys):
    (tmp_path / "tokens").write_text("king a-secret\n")
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = check(
            capsys,
            *secured,
            f"--listen=127.0.0.1:{port}",
            f"--data-dir={tmp_path / 'file'}",
            "--audit-log=/nowhere/audit",
            "--shard-index=1",
            "--num-shards=2",
            "--device=cuda:99",
        )
    assert code == 1
    found = dict(faults(text))
    assert f"127.0.0.1:{port} cannot be bound: Address already in use" in found["ports"]
    assert "--coordinator" in found["shards"]
    assert "tokens, line 1" in found["callers"]
    assert "--device cpu" in found["device"]
    assert "is no folder" in found["data"]
    assert "/nowhere" in found["files"]
    assert text.splitlines()[-1] == "the server would not start: 6 faults"
    assert "secret" not in text


def test_certificates_that_have_expired_or_belong_to_others(tmp_path, capsys):
    authority = trustme.CA()
    for name, end in (("old", -1), ("good", 300)):
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=end)
        issued = authority.issue_cert("localhost", not_before=datetime.datetime(2020, 1, 1), not_after=until)
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    code, text = check(capsys, f"--tls-cert={tmp_path / 'old.pem'}", f"--tls-key={tmp_path / 'old.key'}")
    assert (code, "has expired" in text) == (1, True)
    code, text = check(capsys, f"--tls-cert={tmp_path / 'good.pem'}", f"--tls-key={tmp_path / 'old.key'}")
    assert (code, "belong together" in text) == (1, True)
    code, text = check(capsys, f"--tls-cert={tmp_path / 'good.pem'}", f"--tls-key={tmp_path / 'good.key'}")
    assert code == 0, text


def test_data_of_a_run_and_a_server_that_has_them(tmp_path, capsys):
    data = tmp_path / "data"
    with LocalServer(data_dir=data, run_id="the-run") as server:
        code, text = check(capsys, f"--data-dir={data}")
        assert code == 1
        assert "in use by another server" in dict(faults(text))["data"]
        w = torch.nn.Parameter(torch.zeros(8))
        with psclient.ASGD([w], lr=0.1, server=server.server, worker="w0", settings=ClientSettings()) as optimizer:
            w.sum().backward()
            optimizer.step()
    code, text = check(capsys, f"--data-dir={data}")
    assert code == 0, text
    assert "continues run the-run, from version 1" in text
    code, text = check(capsys, f"--data-dir={data}", "--shards=2")
    assert code == 1
    assert "--num-shards 1" in dict(faults(text))["data"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_this_user_cannot_write(tmp_path, capsys):
    (tmp_path / "data").mkdir(mode=0o500)
    code, text = check(capsys, f"--data-dir={tmp_path / 'data'}")
    assert (code, "cannot write to" in text) == (1, True)


def test_wrong_settings_end_with_status_2(capsys):
    assert main(["serve", "--check-config", "--lease-seconds=15x"]) == 2
    assert "15s" in capsys.readouterr().err
    assert main(["serve", "--check-config", "--tls-cert=x"]) == 2


def test_the_ports_of_several_shards_are_checked(capsys):
    first = ports_in_a_row(2)
    with socket.create_server(("127.0.0.1", first + 1)):
        code, text = check(capsys, "--shards=2", f"--listen=127.0.0.1:{first}")
    assert code == 1
    assert f"127.0.0.1:{first + 1} cannot be bound" in text

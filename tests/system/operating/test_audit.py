"""What operators do leaves one line in the log: who, from where, in which role, and how it ended; and no token."""

import hashlib
import json
from datetime import UTC, datetime, timedelta

import pytest
import torch
import trustme

import psclient
from psclient import LocalServer
from psclient.settings import ClientSettings
from psservice.cli.main import main

ADMIN, WORKER = "an-admin's-token", "a-worker's-token"


def name_of(token):
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def audited(log):
    lines = map(json.loads, log.read_text().splitlines())
    return [line for line in lines if line["name"] == "psservice.audit"]


def test_each_act_of_an_operator_leaves_one_line(tmp_path, monkeypatch):
    tokens, log = tmp_path / "tokens", tmp_path / "log"
    tokens.write_text(f"admin {ADMIN}  # a-comment\nworker {WORKER}\n")
    settings = {"log_format": "json", "log_level": "info", "tokens": tokens, "data_dir": tmp_path / "data"}
    with log.open("w") as stream, LocalServer(log_to=stream, **settings) as server:
        address = server.addresses[0]
        w = torch.nn.Parameter(torch.zeros(8))
        mine = ClientSettings(token=WORKER)
        with psclient.ASGD([w], lr=0.1, server=address, worker="w0", settings=mine) as optimizer:
            w.sum().backward()
            optimizer.step()
            monkeypatch.setenv("PSCLIENT_TOKEN", ADMIN)
            for words, status in (
                (["checkpoint", "create", "--name", "good"], 0),
                (["drain"], 0),
                (["drain", "--undo"], 0),
                (["evict", "w0", "--ban-seconds", "1"], 0),
                (["evict", "nobody"], 3),
                (["restore", "--checkpoint", "good"], 0),
                (["checkpoint", "create", "--name", "better"], 0),
                (["checkpoint", "delete", "good"], 0),
                (["status"], 0),
                (["finish"], 0),
                (["finish"], 0),
            ):
                assert main([*words, address]) == status, words
            monkeypatch.setenv("PSCLIENT_TOKEN", WORKER)
            assert main(["drain", address]) == 3
    found = audited(log)
    acts = [(line["rpc"], line.get("act") or line.get("worker") or line.get("checkpoint")) for line in found]
    assert acts == [
        ("TakeSnapshot", "good"),
        ("Drain", "close"),
        ("TakeSnapshot", acts[2][1]),
        ("Drain", "open"),
        ("EvictWorker", "w0"),
        ("EvictWorker", "nobody"),
        ("RestoreModel", "good"),
        ("TakeSnapshot", "better"),
        ("DeleteCheckpoint", "good"),
        ("FinishRun", None),
    ]
    for line in found:
        assert (line["role"], line["token"]) == ("admin", name_of(ADMIN))
        assert line["peer"].startswith("ipv4:127.0.0.1:")
        assert line["outcome"] == ("NO_SUCH_WORKER" if line.get("worker") == "nobody" else "OK")
    assert found[4]["ban_seconds"] == 1
    text = log.read_text()
    assert not any(secret in text for secret in (ADMIN, WORKER, "a-comment"))
    refused = [line for line in map(json.loads, text.splitlines()) if line["message"] == "refused"]
    assert [(line["rpc"], line["reason"]) for line in refused if line["rpc"] == "Drain"] == [
        ("Drain", "PERMISSION_DENIED")
    ]


def test_a_certificate_names_the_caller(tmp_path, monkeypatch):
    authority, log = trustme.CA(), tmp_path / "log"
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, common_name in (("server", "psservice"), ("mine", "anna")):
        issued = authority.issue_cert("localhost", "127.0.0.1", common_name=common_name)
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    names = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
    files = {setting: tmp_path / name for setting, name in names.items()}
    for name, file in (("CA", "ca.pem"), ("CERT", "mine.pem"), ("KEY", "mine.key")):
        monkeypatch.setenv(f"PSCLIENT_TLS_{name}", str(tmp_path / file))
    with log.open("w") as stream, LocalServer(log_to=stream, log_format="json", log_level="info", **files) as server:
        assert main(["drain", server.addresses[0]]) == 0
    (line,) = audited(log)
    assert (line["certificate"], line["role"]) == ("anna", "admin")
    assert "token" not in line


@pytest.mark.long
@pytest.mark.executes_python  # the zone is read at the start
@pytest.mark.parametrize("form", ["text", "json"])
def test_the_times_of_the_log_have_their_zone(form, tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    log = tmp_path / "log"
    with log.open("w") as stream, LocalServer(log_to=stream, log_format=form, log_level="info"):
        pass
    lines = log.read_text().splitlines()
    assert lines
    for line in lines:
        written = line.split()[0] if form == "text" else json.loads(line)["time"]
        time = datetime.fromisoformat(written)
        assert abs(time - datetime.now(UTC)) < timedelta(hours=1)
        assert time.utcoffset() == (timedelta(hours=5, minutes=30) if form == "text" else timedelta(0))

"""Which servers a command asks if none is named, and how ``psclient``'s commands prove who they are."""

import pytest
import safetensors.torch
import torch
import trustme

import psclient
from psclient import LocalServer
from psclient.cli import main as psclient_main
from psclient.settings import ClientSettings
from psservice.cli.main import main
from psservice.settings import SettingsError, load
from tests.certificates import dns, write
from tests.system.operating.asking import run
from tests.system.serving import serving
from tests.system.tools import QUICK, make_data, make_model, train_step


@pytest.fixture(scope="module")
def servers():
    with LocalServer(run_id="first") as first, LocalServer(run_id="second") as second:
        yield first, second


def test_operators_commands_ask_the_named_servers_else_their_own_variables_else_a_workers(servers, monkeypatch, capsys):
    first, second = (server.addresses[0] for server in servers)
    monkeypatch.setenv("PSCLIENT_SERVER", first)
    assert run(capsys, "status")[1].out.startswith(first)
    monkeypatch.setenv("PSSERVICE_ENDPOINTS", second)
    assert run(capsys, "status")[1].out.startswith(second)
    assert run(capsys, "status", first)[1].out.startswith(first)
    monkeypatch.setenv("PSSERVICE_ENDPOINTS", f"{first},{second}")
    assert all(address in run(capsys, "status")[1].out for address in (first, second))
    monkeypatch.setenv("PSSERVICE_ENDPOINTS", "")
    assert run(capsys, "status")[1].out.startswith(first)
    monkeypatch.delenv("PSSERVICE_ENDPOINTS")
    monkeypatch.delenv("PSCLIENT_SERVER")
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    assert ended.value.code == 2


def test_a_mistyped_variable_is_told_of_and_a_server_ignores_the_right_one(monkeypatch, capsys):
    monkeypatch.setenv("PSSERVICE_ENDPOINTS", "127.0.0.1:1")
    assert load([]).listen
    monkeypatch.setenv("PSSERVICE_ENDPOINT", "127.0.0.1:1")
    code, printed = run(capsys, "status")
    assert code == 2
    assert "did you mean PSSERVICE_ENDPOINTS" in printed.err
    with pytest.raises(SettingsError, match="PSSERVICE_ENDPOINT:"):
        load([])


def test_psclients_commands_take_the_flags_of_psservices(tmp_path, capsys):
    """Certificates and token are flags, as of ``psservice status``, in place of the variables of a worker."""
    authority = trustme.CA()
    files = write(authority, tmp_path, "server", dns("localhost"))
    (tmp_path / "roles").write_text("worker a-worker\nreader a-reader\n")
    (tmp_path / "tokens").write_text("reader a-readers-token\n")
    (tmp_path / "token").write_text("a-readers-token\n")
    secured = {"tls_cert": files["tls_cert"], "tls_key": files["tls_key"], "tls_client_ca": files["tls_ca"]}
    secured |= {"certificate_roles": tmp_path / "roles", "tokens": tmp_path / "tokens"}
    with LocalServer(**secured, cut_seconds=0.05) as server:
        worker = write(authority, tmp_path, "worker", dns("a-worker")) | {"tls_server_name": "localhost"}
        model = make_model(batch_norm=False)
        settings = QUICK.model_copy(update={**ClientSettings(**worker).model_dump(include={*worker})})
        options = {"lr": 0.05, "model": model, "server": server.server, "worker": "w", "settings": settings}
        with psclient.ASGD(model.parameters(), **options) as optimizer:
            train_step(model, optimizer, *make_data())
        reader = write(authority, tmp_path, "reader", dns("a-reader")) | {"tls_server_name": "localhost"}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in reader.items()]
        stranger = write(authority, tmp_path, "stranger", dns("a-stranger")) | {"tls_server_name": "localhost"}
        others = [f"--{name.replace('_', '-')}={value}" for name, value in stranger.items()]
        saved = tmp_path / "model.safetensors"
        assert psclient_main(["save", server.server, f"--out={saved}", "--timeout=10s", *flags]) == 0
        assert safetensors.torch.load_file(saved).keys() == model.state_dict().keys()
        saved.unlink()
        assert psclient_main(["save", server.server, f"--out={saved}", "--timeout=10s", *others]) == 1
        assert "--certificate-roles" in capsys.readouterr().err
        with_token = [*others, f"--token-file={tmp_path / 'token'}"]
        assert psclient_main(["save", server.server, f"--out={saved}", "--timeout=10s", *with_token]) == 0
        assert saved.exists()
        assert main(["status", server.server, *flags]) == 0


def test_psclients_commands_take_shards_in_any_order_and_one_for_all(tmp_path, capsys, monkeypatch):
    with serving(tmp_path / "log", cut_seconds=0.05, metrics_listen="") as server:
        addresses = [server.address_of(shard) for shard in range(3)]
        model = make_model(batch_norm=False)
        options = {"lr": 0.05, "model": model, "server": addresses, "worker": "w", "settings": QUICK}
        with psclient.ASGD(model.parameters(), **options) as optimizer:
            train_step(model, optimizer, *make_data())
            optimizer.pull()
        saved = tmp_path / "model.safetensors"
        for named in (addresses, addresses[::-1], [",".join(addresses[1:]), addresses[0]], [addresses[1]]):
            assert psclient_main(["save", *named, f"--out={saved}", "--timeout=30s"]) == 0, named
            found = safetensors.torch.load_file(saved)
            assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
        assert psclient_main(["follow", *addresses[::-1], f"--out={tmp_path / 'dir'}", "--once", "--timeout=30s"]) == 0
        capsys.readouterr()
        assert psclient_main(["save", *addresses[:2], f"--out={saved}", "--timeout=3s"]) == 1
        assert psclient_main(["save", addresses[0], addresses[0], f"--out={saved}"]) == 1
        assert "twice" in capsys.readouterr().err

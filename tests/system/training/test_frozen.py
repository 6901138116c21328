"""Parameters that need no gradient: compared with the run's, and never sent, stored or copied."""

import copy
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import psclient
from psclient.cli import main
from psclient.errors import ConfigurationError, FingerprintMismatchError, ModelChangedError, ModelLoadedError
from psclient.rpc.local_server import LocalServer
from tests.system.operating.asking import status
from tests.system.tools import QUICK, make_data, train_step

TRAINED = 4 * 8 + 4
BASE = 20 * 400 + 400 + 400 * 8 + 8


def adapted(seed=0, base_seed=7):
    """A base that stays as it is under a head that is trained."""
    torch.manual_seed(base_seed)
    base = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 8)).requires_grad_(False)
    torch.manual_seed(seed)
    return nn.Sequential(base, nn.Linear(8, 4))


def adapted_from(model):
    model[0].requires_grad_(False)
    return model


def joined(model, server, worker="w0", **update):
    settings = QUICK.model_copy(update=update)
    return psclient.ASGD(
        model.parameters(), lr=0.1, model=model, server=server.server, worker=worker, settings=settings
    )


def test_frozen_parameters_are_neither_sent_nor_stored_and_the_file_says_so(tmp_path, caplog):
    model, file = adapted(), tmp_path / "model.safetensors"
    base = [parameter.clone() for parameter in model[0].parameters()]
    with LocalServer() as server, joined(model, server) as optimizer:
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        assert optimizer.totals.upload_bytes < 8 * TRAINED
        assert status(server).parameters == TRAINED
        assert all(map(torch.equal, model[0].parameters(), base))
        caplog.set_level(logging.WARNING, "psclient")
        assert main(["save", server.server, "--out", str(file)]) == 0
    assert "4 frozen parameters" in caplog.text
    assert sorted(load_file(file)) == ["1.bias", "1.weight"]


def test_workers_with_the_same_base_train_together_and_others_are_told_which_tensor_differs():
    with LocalServer() as server, joined(adapted(), server):
        second = adapted(seed=1)
        with joined(second, server, "w1") as optimizer:
            train_step(second, optimizer, *make_data())
        with pytest.raises(FingerprintMismatchError, match="upload_frozen") as refused:
            joined(adapted(base_seed=8), server, "w2")
        assert refused.value.tensor == "0.0.weight"


def test_a_restarted_server_knows_the_base_still(tmp_path):
    with LocalServer(data_dir=tmp_path / "data") as server:
        joined(adapted(), server).close()
        server.processes[0].terminate()
        server.restart()
        joined(adapted(1), server).close()
        with pytest.raises(FingerprintMismatchError):
            joined(adapted(base_seed=8), server)


def test_they_are_the_servers_where_that_is_asked_for():
    other = adapted(base_seed=8)
    with LocalServer() as server, joined(adapted(), server, upload_frozen=True):
        assert status(server).parameters == TRAINED + BASE
        with joined(other, server, "w1", upload_frozen=True):
            assert all(map(torch.equal, other[0].parameters(), adapted()[0].parameters()))
        with pytest.raises(FingerprintMismatchError):
            joined(adapted(), server, "w2")


@pytest.mark.parametrize("stores", [True, False], ids=["run stores", "worker stores"])
@pytest.mark.parametrize("by_setting", [True, False], ids=["upload_frozen", "requires_grad"])
def test_what_one_side_only_has_frozen_is_said_to_be_so(stores, by_setting):
    def of(is_stored):
        if by_setting:
            return adapted(), {"upload_frozen": is_stored}
        return adapted().requires_grad_(True) if is_stored else adapted(), {}

    (first, settings), (second, others) = of(stores), of(not stores)
    where = "frozen in this worker and stored by the run" if stores else "frozen in the run and not in this worker"
    with LocalServer() as server, joined(first, server, **settings):
        with pytest.raises(FingerprintMismatchError, match=f"{where}.*requires_grad.*UPLOAD_FROZEN") as refused:
            joined(second, server, "w1", **others)
        assert refused.value.tensor == "0.0.weight"


@pytest.mark.parametrize("last_stored", [True, False])
def test_that_is_said_of_the_last_parameter_too(last_stored):
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    (second if last_stored else first).bias.requires_grad_(False)
    with LocalServer() as server, joined(first, server):
        with pytest.raises(FingerprintMismatchError, match="UPLOAD_FROZEN") as refused:
            joined(second, server, "w1")
        assert refused.value.tensor == "bias"


def test_one_that_is_thawed_later_is_an_error_and_not_left_out_in_silence():
    model = adapted()
    with LocalServer() as server, joined(model, server) as optimizer:
        model[0].requires_grad_(True)
        with pytest.raises(ModelChangedError, match="UPLOAD_FROZEN") as changed:
            train_step(model, optimizer, *make_data())
        assert changed.value.tensor == "0.0.weight"
    with LocalServer() as server:
        optimizer = psclient.ASGD(model[1].parameters(), lr=0.1, model=adapted_from(model), server=server.server)
        with optimizer, pytest.raises(ConfigurationError, match="UPLOAD_FROZEN"):
            optimizer.add_param_group({"params": [*model[0].parameters()]})


def test_outer_copies_what_is_trained():
    model = adapted()
    with LocalServer() as server:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with psclient.Outer(inner, sync_every=2, model=model, server=server.server, settings=QUICK) as optimizer:
            for _ in range(4):
                train_step(model, optimizer, *make_data())
            assert sum(start.numel() for start in optimizer._steps._start.values()) == TRAINED
            assert optimizer.version == 2


@pytest.mark.parametrize("seed", [7, 8])
def test_a_whole_models_file_starts_a_run_of_its_trained_tensors(tmp_path, seed):
    save_file(adapted(base_seed=seed).state_dict(), tmp_path / "whole.safetensors")
    with LocalServer(init=tmp_path / "whole.safetensors") as server:
        if seed == 7:
            joined(adapted(1), server).close()
            assert status(server).parameters == TRAINED
        else:
            with pytest.raises(FingerprintMismatchError, match="--init file has other values"):
                joined(adapted(1), server)


class Distilled(nn.Module):
    """A student, and a teacher that is the student's moving average."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        return self.student(x)

    @torch.no_grad()
    def follow(self):
        for average, value in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            average.lerp_(value, 0.5)


@pytest.mark.parametrize("on_load", [None, "server", "replace"])
def test_a_teacher_that_the_loop_writes_to_is_said_to_be_out_of_place(on_load):
    model = Distilled()
    with LocalServer() as server, joined(model, server, upload_frozen=True, on_load=on_load or "error") as optimizer:
        train_step(model, optimizer, *make_data())
        model.follow()
        kept = model.teacher[0].weight.clone()
        for _ in range(2):
            with pytest.raises(
                ModelChangedError, match=r"'teacher\.0\.weight'.*keep it out of model=.*A teacher"
            ) as said:
                train_step(model, optimizer, *make_data())
            assert type(said.value) is ModelChangedError
        assert torch.equal(model.teacher[0].weight, kept)
        optimizer.pull()
        train_step(model, optimizer, *make_data())
        assert torch.equal(model.teacher[0].weight, kept) == (on_load == "replace")
        with torch.no_grad():
            model.teacher[0].weight.add_(1)
            model.student[0].weight.add_(1)
        if on_load is None:  # a model that was loaded is another matter
            with pytest.raises(ModelLoadedError):
                train_step(model, optimizer, *make_data())
        else:
            train_step(model, optimizer, *make_data())


def test_a_part_that_is_frozen_for_a_while_is_loaded_as_any_other():
    model = Distilled()
    model.teacher.requires_grad_(True)
    with LocalServer() as server, joined(model, server, upload_frozen=True, on_load="server") as optimizer:
        train_step(model, optimizer, *make_data())
        model.teacher.requires_grad_(False)
        model.follow()
        train_step(model, optimizer, *make_data())
        assert optimizer.version == 2

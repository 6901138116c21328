"""Backups of running servers: exported, the machines lost, imported on empty ones, and the run goes on."""

import json
import os
import pty
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import psclient
from psclient.errors import SparsepsError
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.backups import importing
from psservice.backups.manifest import BACKUP_NAME
from psservice.backups.retention import expired
from psservice.backups.store import Store
from psservice.cli import main as cli
from psservice.ctl.client import call
from psservice.storage.files import DISK
from tests.stored_backups import NAME, files_below, store_with_backup
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, train_step, wait_until
from tests.tiers import long_but

SHARDS = 2
ASIDE = {"checkpoint", "is_named", "segment", "created_unix_seconds", "crc32", "generation", "workers", "origins"}
"""What a manifest may have otherwise after an import: another history has begun, and leases have other times."""


class Run:
    """Two shards, and a worker whose optimizer's state is at the server and which leases its samples."""

    def __init__(self, directory):
        self.data, self.store = directory / "data", directory / "store"
        self.server = LocalServer(shards=SHARDS, data_dir=self.data, keep_snapshots=2)
        self.model = make_model(batch_norm=False)
        self.optimizer = psclient.ServerOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            {"lr": 0.01},
            model=self.model,
            server=self.server.server,
            settings=QUICK,
        )
        dataset = TensorDataset(*make_data(count=64))
        sampler = psclient.ElasticSampler(dataset, self.optimizer, lease_samples=16, name="train")
        self.batches = iter(DataLoader(dataset, sampler=sampler, batch_size=8))

    def train(self, steps=1):
        for _ in range(steps):
            train_step(self.model, self.optimizer, *next(self.batches))

    def status(self):
        return [call(address, "GetStatus", pb.GetStatusRequest(), 10) for address in self.server.addresses]

    def lose_all_machines(self):
        for process in self.server.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.data)

    def restart(self):
        for index in range(SHARDS):
            self.server.restart(index)

    def saved(self):
        """Return manifest and tensors of each shard's newest snapshot."""
        newest = [max((self.data / f"shard-{i}-of-{SHARDS}" / "snapshots").glob("0*")) for i in range(SHARDS)]
        return [(json.loads((p / "manifest.json").read_text()), load_file(p / "state.safetensors")) for p in newest]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    with run.server:
        yield run
        run.optimizer.close()


def command(capsys, *words):
    capsys.readouterr()
    code = cli.main(["checkpoint", *map(str, words)])
    return code, capsys.readouterr()


def done(capsys, *words):
    code, printed = command(capsys, *words, "--output=json")
    assert code == 0, printed.err
    return json.loads(printed.out)


def test_a_run_goes_on_on_empty_machines_where_the_backup_was_taken(run, capsys):
    run.train(3)
    backup = done(capsys, "export", "new", run.server.server, "--to", run.store)
    saved, before = run.saved(), psclient.download(run.server.server)
    run_id = run.status()[0].run_id
    run.train(2)  # what is behind the backup is lost
    run.lose_all_machines()
    done(capsys, "import", backup["checkpoint"], "--from", run.store, "--data-dir", run.data)
    run.restart()
    assert [each.version for each in run.status()] == [3, 3] == [each["version"] for each in backup["shards"]]
    assert {each.run_id for each in run.status()} == {run_id}
    after = psclient.download(run.server.server)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for (manifest, tensors), (kept, values) in zip(saved, run.saved(), strict=True):
        assert {k: v for k, v in kept.items() if k not in ASIDE} == {
            k: v for k, v in manifest.items() if k not in ASIDE
        }
        assert tensors.keys() == values.keys()
        assert len(tensors) > 1, "the optimizer's state"
        assert all(torch.equal(tensors[name], values[name]) for name in tensors)
    assert saved[0][0]["datasets"]
    run.train(2)
    assert_same_parameters(run.model, run.server.server)
    assert not any(each.lost_versions for status in run.status() for each in status.known_shards)
    code, _ = command(capsys, "show", backup["checkpoint"], run.server.server, "--verify")
    assert code == 0, "the shards have the checkpoint still"


def test_a_worker_that_was_ahead_of_the_backup_pulls_everything(run, capsys):
    run.train(1)
    done(capsys, "export", "new", run.server.server, "--to", run.store)
    run.train(3)
    run.lose_all_machines()
    (stored,) = done(capsys, "list", "--from", run.store)["backups"]
    done(capsys, "import", stored["checkpoint"], "--from", run.store, "--data-dir", run.data)
    run.restart()
    for _ in range(3):  # to the same numbers of versions, with other values
        train_step(run.model, run.optimizer, *make_data())
    assert_same_parameters(run.model, run.server.server)


@pytest.mark.long
def test_a_pinned_checkpoint_stays_until_it_is_deleted(run, capsys):
    pinned = done(capsys, "create", run.server.server)[0]["checkpoint"]
    done(capsys, "pin", pinned, run.server.server)
    for _ in range(4):
        run.train()
        done(capsys, "create", run.server.server)
    rows = {row["checkpoint"]: row for row in done(capsys, "list", run.server.server)["checkpoints"]}
    assert rows[pinned]["pinned"]
    assert len([name for name in rows if name]) == 3
    for index, process in enumerate(run.server.processes):
        process.terminate()
        process.wait()
        run.server.restart(index)
    code, printed = command(capsys, "delete", pinned, run.server.server)
    assert (code, printed.err) == (0, "")
    assert command(capsys, "pin", pinned, run.server.server)[0] == 3
    assert pinned not in json.dumps(done(capsys, "list", run.server.server))


def test_what_a_server_is_stopped_with_does_not_take_a_pinned_checkpoints_place(run, capsys):
    pinned = done(capsys, "create", run.server.server)[0]["checkpoint"]
    done(capsys, "pin", pinned, run.server.server)
    for index, process in enumerate(run.server.processes):
        process.terminate()
        process.wait()
        run.server.restart(index)
    (row,) = [row for row in done(capsys, "list", run.server.server)["checkpoints"] if row["checkpoint"] == pinned]
    assert row["pinned"]
    assert row["versions"] == {"0": 0, "1": 0}


def test_a_checkpoint_that_one_shard_lacks_is_neither_pinned_nor_exported(run, capsys):
    alone = "alone"
    call(run.server.addresses[0], "TakeSnapshot", pb.TakeSnapshotRequest(checkpoint=alone), 10)
    code, printed = command(capsys, "pin", alone, run.server.server)
    assert (code, "not at shard 1; nothing was pinned" in printed.err) == (3, True)
    code, printed = command(capsys, "export", alone, run.server.server, "--to", run.store)
    assert (code, "no backup was written" in printed.err) == (3, True)
    assert not [each for each in files_below(run.store) if BACKUP_NAME in each]


def test_a_checkpoint_that_is_damaged_on_a_shards_disk_is_not_exported(run, capsys):
    taken = done(capsys, "create", run.server.server)
    path = os.path.join(taken[1]["path"], "state.safetensors")
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    for words in (("export", "--to", run.store), ("show", "--verify")):
        code, printed = command(capsys, words[0], taken[0]["checkpoint"], run.server.server, *words[1:])
        assert code == 3
        assert "damaged on that shard's disk" in printed.err
        assert run.server.addresses[1] in printed.err
    assert not (run.store / taken[0]["checkpoint"] / BACKUP_NAME).exists()


def test_an_export_that_broke_off_is_begun_again(run, capsys):
    checkpoint = done(capsys, "create", run.server.server)[0]["checkpoint"]
    done(capsys, "export", checkpoint, run.server.server, "--to", run.store)
    folder = run.store / checkpoint
    (folder / BACKUP_NAME).unlink()
    (folder / "shard-0-of-2" / "state.safetensors").write_bytes(b"half")
    (listed,) = done(capsys, "list", "--from", run.store)["unusable"]
    assert "broke off" in listed["error"]
    done(capsys, "export", checkpoint, run.server.server, "--to", run.store)
    assert done(capsys, "show", checkpoint, "--from", run.store, "--verify")["verified"]
    code, printed = command(capsys, "export", checkpoint, run.server.server, "--to", run.store)
    assert (code, "is there already" in printed.err) == (3, True)


def test_old_backups_go_and_those_with_a_name_stay(run, capsys):
    done(capsys, "create", run.server.server, "--name", "before the cut")
    done(capsys, "export", "before the cut", run.server.server, "--to", run.store)
    exported = [
        done(capsys, "export", "new", run.server.server, "--to", run.store, "--keep", 2)["checkpoint"] for _ in range(4)
    ]
    stored = [each["checkpoint"] for each in done(capsys, "list", "--from", run.store)["backups"]]
    assert stored == ["before the cut", *exported[-2:]]
    code, _ = command(capsys, "delete", "before the cut", "--from", run.store)
    assert code == 0
    assert sorted(os.listdir(run.store)) == exported[-2:]


def test_retention_keeps_what_either_rule_keeps_and_other_runs(tmp_path):
    store = Store(str(store_with_backup(tmp_path)))
    good = store.require(NAME)

    def at(day, **changes):
        changes = {"checkpoint": f"day {day}", "is_named": False, "exported_unix_seconds": day * 86400.0} | changes
        return good.model_copy(update=changes)

    days = [at(day) for day in range(1, 11)]
    backups = [*days, at(2, run_id="another", checkpoint="x"), at(3, is_named=True, checkpoint="named")]

    def gone(keep, keep_days, newest=days[-1]):
        return [each.checkpoint for each in expired(backups, newest, keep, keep_days)]

    assert gone(2, None) == [f"day {day}" for day in range(1, 9)]
    assert gone(None, 3.0) == [f"day {day}" for day in range(1, 7)]
    assert gone(5, 1.0) == [f"day {day}" for day in range(1, 6)]
    assert gone(1, None, newest=days[0]) == [f"day {day}" for day in range(2, 10)], "what was just exported stays"


def test_a_dry_run_says_where_a_restore_would_go_and_changes_nothing(run, capsys):
    run.train(3)
    before = [(each.version, each.generation) for each in run.status()]
    capsys.readouterr()
    assert cli.main(["restore", run.server.server, "--version", "1", "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in printed] == ["would go back from version 3 to 1"] * 2
    assert cli.main(["restore", run.server.server, "--version", "1", "--dry-run", "-o", "json"]) == 0
    for told in json.loads(capsys.readouterr().out):
        assert (told["dry_run"], told["version_now"], told["version"]) == (True, 3, 1)
    assert cli.main(["restore", run.server.server, "--version", "9", "--dry-run"]) == 3
    assert cli.main(["restore", run.server.server, "--checkpoint", "none", "--dry-run"]) == 3
    assert "no shard could be taken back" in capsys.readouterr().err
    assert [(each.version, each.generation) for each in run.status()] == before
    run.train()
    assert_same_parameters(run.model, run.server.server)


@pytest.mark.parametrize(
    "words", long_but([["finish"]], [["finish"], ["restore", "--version", "0"], ["checkpoint", "delete", "a"]])
)
def test_a_command_that_takes_something_away_asks_whoever_is_at_the_terminal(words, run, capsys):
    done(capsys, "create", run.server.server, "--name", "a")
    run.train()
    done(capsys, "create", run.server.server)
    before = [(each.version, each.run_state) for each in run.status()]
    said = at_a_terminal([*words, run.server.server], "n")
    assert "Go on? [y/N]" in said
    assert "nothing was done" in said
    assert [(each.version, each.run_state) for each in run.status()] == before
    assert command(capsys, "show", "a", run.server.server)[0] == 0
    assert "nothing was done" not in at_a_terminal([*words, run.server.server], "y")
    changed = [(each.version, each.run_state) for each in run.status()]
    assert changed != before or command(capsys, "show", "a", run.server.server)[0] == 3


def at_a_terminal(words, answer):
    """Run a command whose streams are a terminal, answer its question, and return what it prints."""
    terminal, mine = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "psservice", *words], stdin=mine, stdout=mine, stderr=mine)
    os.close(mine)
    said, has_answered = b"", False
    try:
        while data := read(terminal):
            said += data
            if b"[y/N]" in said and not has_answered:
                os.write(terminal, f"{answer}\n".encode())
                has_answered = True
    finally:
        process.wait(60)
        os.close(terminal)
    assert process.returncode == (0 if answer == "y" else 3), said
    return said.decode()


def read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


# On the disk


def put(tmp_path, store, **options):
    manifest = store.require(NAME)
    return importing.import_backup(store, manifest, tmp_path / "data", options.get("shards", range(2)))


def test_nothing_is_written_over_what_is_there(tmp_path):
    store = Store(str(store_with_backup(tmp_path)))
    put(tmp_path, store)
    before = files_below(tmp_path / "data")
    with pytest.raises(importing.BackupError, match="is there already"):
        put(tmp_path, store)
    assert files_below(tmp_path / "data") == before
    (tmp_path / "data" / "shard-0-of-2").rename(tmp_path / "data" / "shard-0-of-3")
    with pytest.raises(importing.BackupError, match="another number of shards"):
        put(tmp_path, store)


@pytest.mark.parametrize("call_", ["rename", "sync", "make_directory"])
def test_an_import_that_died_anywhere_is_taken_up(call_, tmp_path, monkeypatch):
    """It is struck at each of its calls in turn; what it leaves is as after a kill, without its own clean-up."""
    store, data = Store(str(store_with_backup(tmp_path))), tmp_path / "data"
    real, struck = getattr(type(DISK), call_), 0
    for number in range(100):
        calls = iter(range(100))

        def strike(self, *arguments, calls=calls, number=number):
            if next(calls) == number:
                raise KeyboardInterrupt
            return real(self, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(type(DISK), call_, strike)
            patched.setattr(importing.shutil, "rmtree", lambda *_, **__: None)
            try:
                put(tmp_path, store)
                break
            except KeyboardInterrupt:
                struck += 1
        assert (data / ".import").exists() or not [*data.glob("shard-*")]
        put(tmp_path, store)
        assert sorted(each.name for each in data.iterdir()) == ["shard-0-of-2", "shard-1-of-2"]
        shutil.rmtree(data)
    assert struck > 1


def test_no_server_starts_where_an_import_has_not_ended(tmp_path, capfd):
    put(tmp_path, Store(str(store_with_backup(tmp_path))))
    (tmp_path / "data" / ".import").mkdir()
    with pytest.raises(SparsepsError):
        LocalServer(data_dir=tmp_path / "data")
    assert "a backup is being imported into" in capfd.readouterr().err


def test_another_backup_does_not_take_up_an_import_that_died(tmp_path, monkeypatch):
    store, data = Store(str(store_with_backup(tmp_path))), tmp_path / "data"
    put(tmp_path, store)
    (data / ".import").mkdir()
    other = store.require(NAME).model_copy(update={"run_id": "another"}).sealed()
    (data / ".import" / BACKUP_NAME).write_bytes(other.to_bytes())
    with pytest.raises(importing.BackupError, match=r"of run 'another'.*broke off"):
        put(tmp_path, store)


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path, monkeypatch):
    store = Store(str(store_with_backup(tmp_path)))
    monkeypatch.setattr(importing.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 9))
    with pytest.raises(importing.BackupError, match="has room for 9 B"):
        put(tmp_path, store)
    assert files_below(tmp_path / "data") == []


def test_a_restored_run_starts_by_the_usual_command(tmp_path):
    store = Store(str(store_with_backup(tmp_path)))
    put(tmp_path, store)
    with LocalServer(shards=2, data_dir=tmp_path / "data") as server:
        found = [call(address, "GetStatus", pb.GetStatusRequest(), 10) for address in server.addresses]
        assert [each.version for each in found] == [2, 2]
        wait_until(lambda: len(psclient.download(server.server)) == 4)

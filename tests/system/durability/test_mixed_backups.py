"""Shards that were restored from backups of different moments say so; nothing else that happens to shards does."""

import json
import logging
import shutil
import signal
from urllib.request import urlopen

import pytest

import psclient
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cli.main import main
from psservice.ctl.client import call
from psservice.state.records import read_record
from psservice.state.v1 import journal_pb2 as rec
from psservice.storage.journal import SegmentReader
from tests.system.tools import QUICK, make_data, make_model, train_step, wait_until
from tests.tiers import long_but

LEASE_SECONDS = 1.5
LOST = "has lost"


class Run:
    """Two shards with a worker that tells each of the other often."""

    def __init__(self, directory):
        self.data, self.log = directory / "data", (directory / "log").open("w+")
        self.server = LocalServer(
            shards=2, data_dir=self.data, down_mode="exact", lease_seconds=LEASE_SECONDS, log_to=self.log
        )
        self.optimizer, self.model = None, make_model(batch_norm=False)
        self.join("first")

    def join(self, worker):
        if self.optimizer is not None:
            self.optimizer.close()
        options = {"settings": QUICK, "lr": 0.05, "momentum": 0.5, "density": 0.05, "worker": worker}
        self.optimizer = psclient.DGS(self.model.parameters(), model=self.model, server=self.server.server, **options)

    def train(self, steps=5):
        for _ in range(steps):
            train_step(self.model, self.optimizer, *make_data())

    def status(self, shard):
        return call(self.server.addresses[shard], "GetStatus", pb.GetStatusRequest(), 10)

    def train_until_known(self, steps=5):
        """Train, and wait until each shard knows, and has written down, the other's newest version."""
        self.train(steps)
        for shard in range(2):
            version = self.status(1 - shard).version
            wait_until(lambda shard=shard, version=version: self.knows(shard, version))

    def knows(self, shard, version):
        folder = self.data / f"shard-{shard}-of-2" / "journal"
        records = (record for path in sorted(folder.iterdir()) for record in SegmentReader(path).records())
        written = (read_record(each.kind, each.body)[0] for each in records)
        known = (history for each in written if isinstance(each, rec.Known) for history in each.histories)
        return any(history.version == version for history in known)

    def checkpoint(self):
        """Take one checkpoint over both shards; return its id."""
        drawn = call(self.server.addresses[0], "TakeSnapshot", pb.TakeSnapshotRequest(), 10).checkpoint
        call(self.server.addresses[1], "TakeSnapshot", pb.TakeSnapshotRequest(checkpoint=drawn), 10)
        return drawn

    def checkpoints(self, shard):
        listed = call(self.server.addresses[shard], "ListCheckpoints", pb.ListCheckpointsRequest(), 10)
        return [each.checkpoint for each in listed.checkpoints]

    def stop(self):
        for process in self.server.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def replace(self, shard, copy):
        folder = f"shard-{shard}-of-2"
        shutil.rmtree(self.data / folder)
        shutil.copytree(copy / folder, self.data / folder)

    def restart(self):
        for shard in range(2):
            self.server.restart(shard)

    def server_log(self):
        self.log.flush()
        return (self.data.parent / "log").read_text()

    def metric(self, shard):
        with urlopen(f"http://{self.server.metrics_addresses[shard]}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if "lost_versions{" in line}

    def assert_no_alarm(self, capsys, caplog):
        capsys.readouterr()
        assert main(["status", *self.server.addresses]) == 0
        assert LOST not in capsys.readouterr().out
        assert LOST not in caplog.text
        assert LOST not in self.server_log()
        assert not any(sum(self.metric(shard).values()) for shard in range(2))


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.optimizer.close()
    run.server.stop()
    run.log.close()


@pytest.mark.parametrize("older", long_but([1], [0, 1]))
def test_shards_of_different_backups_are_named_to_workers_operators_and_monitoring(
    older, run, tmp_path, capsys, caplog
):
    run.train_until_known()
    shutil.copytree(run.data, tmp_path / "a")
    before = run.status(older).version
    run.train_until_known(7)
    lost = run.status(older).version - before
    shutil.copytree(run.data, tmp_path / "b")
    run.stop()
    run.replace(older, tmp_path / "a")
    run.replace(1 - older, tmp_path / "b")
    run.restart()

    assert main(["status", *run.server.addresses]) == 0
    assert f"shard {older} has lost {lost} versions" in capsys.readouterr().out  # before any worker came
    with caplog.at_level(logging.WARNING, "psclient"):
        run.join("second")
    assert f"shard {older} at {run.server.addresses[older]} has lost {lost} versions" in caplog.text
    run.train()
    wait_until(lambda: run.metric(1 - older).get(f'psservice_lost_versions{{of_shard="{older}"}}') == lost)
    wait_until(lambda: "has lost versions" in run.server_log())
    caplog.clear()
    run.join("third")
    assert f"has lost {lost} versions" in caplog.text  # as long as nobody has done anything about it
    capsys.readouterr()
    assert main(["top", "--once", "--interval-seconds", "0.1", *run.server.addresses]) == 0
    assert f"shard {older} has lost {lost} versions" in capsys.readouterr().out
    run.stop()
    run.restart()
    assert main(["status", *run.server.addresses]) == 0
    assert f"shard {older} has lost {lost} versions" in capsys.readouterr().out  # also after a restart
    assert main(["checkpoint", "create", "--name", "accepted", *run.server.addresses]) == 0
    assert main(["restore", "--checkpoint", "accepted", *run.server.addresses]) == 0
    capsys.readouterr()
    assert main(["status", *run.server.addresses]) == 0
    assert LOST not in capsys.readouterr().out


@pytest.mark.long
def test_a_shard_whose_volume_was_taken_back_is_named_even_where_its_start_could_not_notice(run, tmp_path):
    """Bytes of an older copy are written over the files of a shard, which keep their places."""
    run.train_until_known()
    image = {path: path.read_bytes() for path in (run.data / "shard-1-of-2").rglob("*") if path.is_file()}
    run.train_until_known()
    run.stop()
    for path, data in image.items():
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()
    run.restart()
    run.join("second")
    wait_until(lambda: run.metric(1).get('psservice_lost_versions{of_shard="1"}', 0) >= 5)
    assert "taken back" in run.server_log()


@pytest.mark.long
def test_kills_raise_no_alarm(run, capsys, caplog):
    for shard in (0, 1, 0):
        run.train_until_known()
        run.server.processes[shard].send_signal(signal.SIGKILL)
        run.server.restart(shard)
    run.train_until_known()
    run.assert_no_alarm(capsys, caplog)


@pytest.mark.long
def test_a_restore_of_all_shards_raises_no_alarm(run, capsys, caplog):
    run.train_until_known()
    capsys.readouterr()
    assert main(["checkpoint", "create", *run.server.addresses, "--output=json"]) == 0
    checkpoint = json.loads(capsys.readouterr().out)[0]["checkpoint"]
    run.train_until_known()
    assert main(["restore", "--checkpoint", checkpoint, *run.server.addresses]) == 0
    run.train_until_known()
    run.join("second")
    run.train_until_known()
    run.stop()
    run.restart()
    run.train_until_known()
    run.assert_no_alarm(capsys, caplog)


@pytest.mark.long
def test_copies_of_one_checkpoint_raise_no_alarm(run, tmp_path, capsys, caplog):
    run.train_until_known()
    first = call(run.server.addresses[0], "TakeSnapshot", pb.TakeSnapshotRequest(), 10)
    run.train_until_known()  # while workers carry a checkpoint, shard 1 sees newer versions of shard 0
    second = call(run.server.addresses[1], "TakeSnapshot", pb.TakeSnapshotRequest(checkpoint=first.checkpoint), 10)
    for shard, path in enumerate((first.path, second.path)):
        folder = tmp_path / "copy" / f"shard-{shard}-of-2" / "snapshots"
        folder.mkdir(parents=True)
        shutil.copytree(path, folder / path.rsplit("/", 1)[1])
    run.train_until_known()
    run.stop()
    for shard in range(2):
        run.replace(shard, tmp_path / "copy")
    run.server._settings["recover"] = "last-good"
    run.restart()
    run.join("second")
    run.train_until_known()
    assert not caplog.messages or LOST not in caplog.text
    assert not any(sum(run.metric(shard).values()) for shard in range(2))
    capsys.readouterr()
    assert main(["status", *run.server.addresses]) == 0
    assert LOST not in capsys.readouterr().out


@pytest.mark.long
def test_one_lost_shard_and_a_named_checkpoint_take_all_shards_to_one_moment(run, tmp_path, capsys):
    run.train_until_known()
    assert main(["checkpoint", "create", *run.server.addresses, "--name", "nightly", "--output=json"]) == 0
    path = json.loads(capsys.readouterr().out)[1]["path"]
    folder = tmp_path / "backup" / "shard-1-of-2" / "snapshots"
    shutil.copytree(path, folder / path.rsplit("/", 1)[1])
    version = run.status(1).version
    run.train_until_known()
    run.optimizer.close()
    run.stop()
    run.replace(1, tmp_path / "backup")
    run.server._settings["recover"] = "last-good"
    run.restart()
    assert main(["status", *run.server.addresses]) == 0
    assert "shard 1 has lost 5 versions" in capsys.readouterr().out
    assert main(["restore", "--checkpoint", "nightly", *run.server.addresses]) == 0
    assert [run.status(shard).version for shard in range(2)] == [version] * 2
    capsys.readouterr()
    assert main(["status", *run.server.addresses]) == 0
    assert LOST not in capsys.readouterr().out
    run.join("second")
    run.train_until_known()


@pytest.mark.long
@pytest.mark.parametrize("directory", ["an older copy", "empty"])
def test_a_shard_that_was_replaced_takes_no_part_in_a_checkpoint_that_was_announced_before(directory, run, tmp_path):
    run.train_until_known()
    shutil.copytree(run.data, tmp_path / "older")
    run.train_until_known()
    before = run.checkpoint()
    run.train_until_known()
    run.server.processes[1].kill()
    run.server.processes[1].wait()
    shutil.rmtree(run.data / "shard-1-of-2")
    if directory == "an older copy":
        shutil.copytree(tmp_path / "older" / "shard-1-of-2", run.data / "shard-1-of-2")
    run.server._settings["recover"] = "last-good"
    run.server.restart(1)
    run.train()
    version = run.status(0).version
    wait_until(lambda: run.knows(1, version))  # by a renewal, which carried that checkpoint too
    after = call(run.server.addresses[0], "TakeSnapshot", pb.TakeSnapshotRequest(), 10).checkpoint
    wait_until(lambda: after in run.checkpoints(1))
    assert before not in run.checkpoints(1)

"""A standby has what its primary has acknowledged, and serves in its place; the primary that comes back does not."""

import threading

import pytest

import psclient
from psclient.errors import ServerUnreachableError
from psservice.cli.main import main
from tests.system.standby.standby_tools import (
    PATIENT,
    SECONDS,
    CountingWorker,
    counted,
    either,
    follows,
    kill,
    primary,
    standby,
    status,
    stepping,
)
from tests.system.tools import assert_same_parameters, run_of, wait_until
from tests.tiers import long_but

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("shards", long_but([1], [1, 2]))
def test_a_lost_machine_loses_no_acknowledged_push_and_workers_go_on_with_the_standby(shards, tmp_path, capsys):
    with (
        primary(tmp_path, shards=shards, replicate="ack", snapshot_seconds=1.0) as first,
        standby(tmp_path, first) as second,
        stepping(either(first, second)) as fleet,
    ):
        fleet.go_on(60)
        kill(first)
        assert main(["promote", *second.addresses]) == 0
        assert "serves shard 0 at version" in capsys.readouterr().out
        fleet.go_on(60)
        steps = fleet.stop()
        assert counted(second.server) == steps, "every push once"
        for worker in fleet.workers:
            worker.optimizer.pull()
            assert_same_parameters(worker.model, second.server)


@pytest.mark.long
def test_a_primary_that_comes_back_is_refused_by_generation_and_stays_so(tmp_path, capsys):
    log = tmp_path / "log"
    with (
        log.open("w") as stream,
        primary(tmp_path, replicate="ack") as first,
        standby(tmp_path, first, log_to=stream) as second,
        stepping(either(first, second)) as fleet,
    ):
        fleet.go_on(20)
        kill(first)
        assert main(["promote", *second.addresses]) == 0
        first.restart()
        wait_until(lambda: "the former primary serves no more" in log.read_text(), SECONDS)
        fleet.go_on(20)
        assert fleet.stop() == counted(second.server)
        generation = int(status(second, capsys)["generation"])
        fleet.close()
        kill(second)
        kill(first)
        first.restart()
        assert int(status(first, capsys)["replaced_by"]) == generation, "though nobody tells it again"
        with pytest.raises(ServerUnreachableError, match="a standby serves in this server's place"):
            psclient.download(first.server, settings=PATIENT.model_copy(update={"connect_seconds": 1.0}))


def test_a_primary_whose_standby_was_promoted_beside_it_acknowledges_nothing_more(tmp_path, capsys):
    with (
        primary(tmp_path, replicate="ack") as first,
        standby(tmp_path, first) as second,
        stepping(either(first, second)) as fleet,
    ):
        fleet.go_on(20)
        assert main(["promote", *second.addresses]) == 3
        assert "answers: stop it first" in capsys.readouterr().err
        assert main(["promote", "--force", *second.addresses]) == 0
        fleet.go_on(40)
        assert fleet.stop() == counted(second.server)
        assert int(status(first, capsys)["replaced_by"])


def test_without_a_standby_nothing_is_acknowledged_and_all_goes_on_when_it_comes(tmp_path, capsys, caplog):
    with primary(tmp_path, replicate="ack") as first, standby(tmp_path, first) as second:
        worker = CountingWorker(first.server, "w")
        worker.step()
        kill(second)
        run = run_of(worker.optimizer)
        patient = run.settings
        run.settings = patient.model_copy(update={"patience_seconds": 1.0})
        with pytest.raises(ServerUnreachableError, match=r"no standby|has not got it"):
            worker.step()
        run.settings = patient
        waiting = threading.Thread(target=worker.step)
        waiting.start()
        wait_until(lambda: any("does not serve now: no standby follows" in line for line in caplog.messages), SECONDS)
        second.restart()
        waiting.join()
        worker.close()
        applied = counted(first.server)
        assert applied in (worker.steps, worker.steps + 1), "the step that found no standby counts once, if at all"


def test_a_standby_behind_tells_how_far_and_serves_what_it_has(tmp_path, capsys):
    with primary(tmp_path) as first, standby(tmp_path, first) as second, stepping(either(first, second)) as fleet:
        fleet.go_on(40)
        wait_until(lambda: status(first, capsys)["replication"]["connected"], SECONDS)
        steps = fleet.stop()
        wait_until(lambda: follows(first, capsys), SECONDS)
        found = status(first, capsys)["replication"]
        assert not found["acknowledged"]
        assert int(found["behind_versions"]) == 0
        kill(second)
        worker = fleet.workers[0]
        worker.step()
        found = status(first, capsys)["replication"]
        assert int(found["behind_versions"]) == 1
        assert int(found["behind_bytes"]) > 0
        kill(first)
        second.restart()
        assert main(["promote", *second.addresses]) == 0
        assert counted(second.server) == steps


@pytest.mark.long
def test_a_standby_that_was_killed_goes_on_where_it_was(tmp_path, capsys):
    log = tmp_path / "log"
    with (
        log.open("w") as stream,
        primary(tmp_path, snapshot_seconds=1.0, keep_snapshots=1000) as first,
        standby(tmp_path, first, log_to=stream, log_level="info") as second,
        stepping(first.server) as fleet,
    ):
        for _ in range(4):
            fleet.go_on(30)
            kill(second)
            fleet.go_on(10)
            second.restart()
        steps = fleet.stop()
        wait_until(lambda: follows(first, capsys), SECONDS)
        assert log.read_text().count("snapshot received") == 1, "only at first"
        kill(first)
        assert main(["promote", *second.addresses]) == 0
        assert counted(second.server) == steps


@pytest.mark.long
def test_a_standby_follows_another_model_and_a_restore(tmp_path):
    with (
        primary(tmp_path, replicate="ack") as first,
        standby(tmp_path, first) as second,
        stepping(either(first, second)) as fleet,
    ):
        fleet.go_on(20)
        with fleet.paused() as before:
            assert main(["restore", "--version", "10", first.server]) == 0
        fleet.go_on(20)
        kill(first)
        assert main(["promote", *second.addresses]) == 0
        fleet.go_on(20)
        steps = fleet.stop()
        assert counted(second.server) == 10 + steps - before


def test_a_standby_that_serves_is_started_again_as_a_server(tmp_path):
    with (
        primary(tmp_path, replicate="ack") as first,
        standby(tmp_path, first) as second,
        stepping(either(first, second)) as fleet,
    ):
        fleet.go_on(20)
        kill(first)
        assert main(["promote", *second.addresses]) == 0
        fleet.go_on(20)
        kill(second)
        second.restart()
        fleet.go_on(20)
        assert fleet.stop() == counted(second.server)

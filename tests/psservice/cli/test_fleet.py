"""What operators' commands make of several answers: order, one table of workers, rates, exit statuses."""

import pytest

from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl.client import OperateError, Outcome, exit_status
from psservice.ctl.fleet import Fleet, disagreement, saved_share
from psservice.ctl.render import new_console, release_lines
from psservice.ctl.top import frame, frame_plain

NO_ANSWER = OperateError("b: UNAVAILABLE")
REFUSED = OperateError("b: NOT_FOUND", refused=True, reason=ErrorCode.NO_SUCH_WORKER)


def status(index, *workers, **fields):
    return pb.GetStatusResponse(
        shard_index=index, num_shards=2, run_id="r", workers=workers, uptime_seconds=9, **fields
    )


def worker(name, **fields):
    return pb.WorkerStatus(worker_id=name, incarnation="1", **fields)


def fleet_of(*statuses, seconds=0.0):
    return Fleet(tuple(Outcome(f"h{each.shard_index}:1", each) for each in statuses), seconds)


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([None, None], 0),
        ([NO_ANSWER, NO_ANSWER], 1),
        ([REFUSED, REFUSED], 3),
        ([REFUSED, NO_ANSWER], 3),
        ([None, NO_ANSWER], 4),
        ([None, REFUSED], 4),
    ],
)
def test_exit_statuses(errors, code):
    assert exit_status([Outcome("a", answer=object(), error=error) for error in errors]) == code


def test_a_worker_of_several_shards_is_one_line():
    found = fleet_of(
        status(0, worker("w10"), worker("w2", last_step=4, staleness=1, push_bytes=10, lease_remaining_seconds=5)),
        status(1, worker("w2", last_step=5, staleness=3, push_bytes=20, lease_remaining_seconds=4, interval_seconds=9)),
    )
    two, ten = found.workers()
    assert (two.worker_id, ten.worker_id) == ("w2", "w10")
    assert (two.step, two.staleness, two.push_bytes, two.lease_remaining_seconds) == (5, {0: 1, 1: 3}, 30, 4)
    assert (two.missing_shards, ten.missing_shards) == ((), (1,))


def test_rates_are_between_two_looks_and_not_over_a_restart():
    before = fleet_of(status(0, pushes=5, push_bytes=100), status(1, pushes=50))
    restarted = status(1, pushes=1)
    restarted.uptime_seconds = 1
    now = fleet_of(status(0, pushes=9, push_bytes=300), restarted, seconds=2.0)
    rates = now.rates(before)
    assert {*rates} == {"h0:1"}
    assert (rates["h0:1"]["pushes_per_second"], rates["h0:1"]["push_bytes_per_second"]) == (2.0, 100.0)
    assert now.rates(None) == {}


def test_what_is_saved_is_a_share_of_what_dense_would_have_been():
    assert saved_share(status(0)) is None
    assert saved_share(status(0, dense_pull_bytes=8, pull_bytes=4)) is None  # workers have joined, and pushed nothing
    assert saved_share(status(0, push_bytes=1, pull_bytes=1, dense_push_bytes=4, dense_pull_bytes=4)) == 0.75


def test_servers_that_do_not_belong_together_are_told():
    one, two = status(0), status(1)
    assert disagreement({"a": one, "b": two}) == ""
    assert "both shard 0" in disagreement({"a": one, "b": one})
    two.run_id = "other"
    assert "run_id" in disagreement({"a": one, "b": two})
    two.run_id = ""
    assert disagreement({"a": one, "b": two}) == "", "a shard that has not heard of the run yet"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("workers", [0, 2, 40])
@pytest.mark.parametrize("lines", [16, 24, 50])
def test_a_frame_fits_its_terminal(columns, workers, lines):
    names = [worker(f"[bold]worker-{number}", last_step=number) for number in range(workers)]
    found = Fleet((Outcome("h:1", status(0, *names)), Outcome("b:1", error=NO_ANSWER)))
    console = new_console()
    console.width = columns
    with console.capture() as captured:
        console.print(frame(found, {}, columns, lines))
    printed = captured.get().splitlines()
    assert len(printed) <= max(lines, 16)
    assert all(len(line) <= columns for line in printed)
    assert "b:1" in captured.get()
    assert "no answer" in captured.get()
    assert ("more workers" in captured.get()) == (workers > max(3, lines - 12))
    assert ("[bold]worker-0" in captured.get()) == (workers > 0), "a name is no markup"
    assert len(frame_plain(found, {})["workers"]) == workers


def releases_said(*statuses):
    return [line.plain for line in release_lines(fleet_of(*statuses))]


def test_a_line_names_releases_if_there_are_several():
    old, new, silent = (worker(release, release=release) for release in ("0.1.0", "0.2.0", ""))
    assert releases_said(status(0, new, silent, server_version="0.2.0"), status(1, server_version="0.2.0")) == []
    assert releases_said(status(0, server_version="0.1.0"), status(1, old, new, server_version="0.2.0")) == [
        "several releases at once: 0.1.0: shard 0, 1 worker; 0.2.0: shard 1, 1 worker"
    ]
    assert releases_said(status(0, old, server_version="0.2.0")) == [
        "several releases at once: 0.1.0: 1 worker; 0.2.0: shard 0"
    ]

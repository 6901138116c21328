"""Nothing can be written any more, under load: the disk is full, or the files of the server may not grow."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import grpc

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.campaign import SNAPSHOT_SECONDS, Campaign
from verify.client import wire
from verify.cluster.servers import StartFailedError
from verify.cluster.waiting import until
from verify.failpoint import limits
from verify.failpoint.disk import Disk
from verify.validate import server_readings

_FREE_SECONDS = 1.0, 2.0
_FULL_SECONDS = SNAPSHOT_SECONDS, SNAPSHOT_SECONDS + 1  # long enough that a periodic snapshot is due, and fails
_NOTICE_SECONDS, _MEND_SECONDS, _CALL_SECONDS = 20.0, 20.0, 20.0
_SMALL_FILE_BYTES = 4096
_SNAPSHOT_ERRORS, _JOURNAL_ERRORS = "psservice_snapshot_errors_total", "psservice_journal_errors_total"


class FullDisk:
    """Pushes are refused and snapshots fail, both counted; both go on when there is room, and nothing is lost.

    Args:
        disk: holds the data directory; where it is not mounted, files are limited, and no disk is filled.
        rounds: of each kind.
    """

    expected_errors: tuple[str, ...] = "No space left on device", "File too large"

    def __init__(self, disk: Disk, rounds: int) -> None:
        self._disk, self._rounds = disk, rounds

    @property
    def note(self) -> str:
        """Say what is done, and what cannot be."""
        limited = f"files of the server limited to {_SMALL_FILE_BYTES} bytes"
        if self._disk.mounted:
            return f"full disk: a file system in memory, filled to the last byte, and then {limited}"
        return f"full disk: SKIPPED is the file system in memory (no right to mount); {limited}"

    def strike(self, campaign: Campaign) -> None:
        """Fill and free, of each kind; then a server is killed, and started, while the disk is full."""
        kinds = [("files of a server limited", self._limited), ("disk filled", self._filled)]
        for what, full in [kinds[0]] if not self._disk.mounted else kinds:
            for number in range(self._rounds):
                campaign.say(f"{what}: round {number + 1} of {self._rounds}")
                campaign.pause(*_FREE_SECONDS)
                campaign.result.faults[what] += 1
                self._round(campaign, full)
                if campaign.result.failures:
                    campaign.kill([0])  # what it acknowledged is accounted for all the same
                    return
        if self._disk.mounted:
            self._start_on_full_disk(campaign)
        campaign.pause(*_FREE_SECONDS)

    def _round(self, campaign: Campaign, full: Callable[[Campaign], AbstractContextManager[None]]) -> None:
        address, metrics = campaign.servers.addresses[0], campaign.servers.told[0]["metrics"]
        failures = campaign.result.failures
        campaign.await_load(0)

        def count(name: str) -> float:
            return server_readings.metric(metrics, name)

        before = {name: count(name) for name in (_SNAPSHOT_ERRORS, _JOURNAL_ERRORS)}
        with full(campaign):
            campaign.pause(*_FULL_SECONDS)
            said = _ask_for_snapshot(address)
            if said != "NOT_DURABLE":
                failures.append(f"a snapshot asked for on a full disk: {said or 'taken'}, not NOT_DURABLE")
            if not until(lambda: all(count(name) > old for name, old in before.items()), _NOTICE_SECONDS):
                failures.append(f"not all of these have risen on a full disk: {before}")
        version = server_readings.status(address).version
        if not campaign.gets_through(_MEND_SECONDS):
            failures.append(f"no push is acknowledged {_MEND_SECONDS:.0f} s after there was room again")
        if not until(lambda: count("psservice_snapshot_version") > version, _MEND_SECONDS):
            failures.append(f"no snapshot {_MEND_SECONDS:.0f} s after there was room again")

    @contextmanager
    def _filled(self, campaign: Campaign) -> Iterator[None]:
        self._disk.fill()
        yield
        self._disk.free()

    @contextmanager
    def _limited(self, campaign: Campaign) -> Iterator[None]:
        with limits.lowered(campaign.servers.pid(0), resource.RLIMIT_FSIZE, _SMALL_FILE_BYTES):
            yield

    def _start_on_full_disk(self, campaign: Campaign) -> None:
        """A server may refuse to start where it cannot write, and must say so."""
        self._disk.fill()
        campaign.servers.kill(0)
        campaign.result.faults["servers killed"] += 1
        campaign.servers.start(0)
        try:
            campaign.servers.await_ready(0)
            campaign.result.faults["servers started on a full disk"] += 1
        except StartFailedError as error:
            campaign.result.faults["starts refused on a full disk"] += 1
            if error.status is None:
                raise
        self._disk.free()
        campaign.kill([0])


def _ask_for_snapshot(address: str) -> str:
    """Ask for a snapshot; return why it was refused, empty where it was taken."""
    line = wire.Line(address)
    try:
        line.stub.TakeSnapshot(pb.TakeSnapshotRequest(), timeout=_CALL_SECONDS)
    except grpc.RpcError as error:
        return wire.reason_of(error) or f"{error.code().name}: {error.details()}"
    finally:
        line.close()
    return ""

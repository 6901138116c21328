"""``python -m verify.soak``: train for a while, with workers that come and go, and see that nothing grows.

One server with a journal and snapshots; trainers with and without overlap; and one place that is taken by one worker
after another: half of them leave in order, half are killed. Writes ``runs/soak/report.md`` and ``report.json``.
"""

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.harness import machine, plots, report
from benchmarks.harness.progress import Progress
from benchmarks.harness.section import Section, Table
from verify.cluster.servers import Servers, end_on_sigterm
from verify.traffic.team import Team, Trainer
from verify.validate.process_samples import LEAST_POINTS, Sample, Trend, look, trend

_SAMPLE_SECONDS, _WINDOW_SECONDS, _VISIT_SECONDS = 1.0, 5.0, 12.0  # less in a soak of under a minute and a half
_LEAST_SAMPLES, _LEAST_WINDOWS, _LEAST_VISITS = 30, 18, 4
_SNAPSHOT_SECONDS, _LEASE_SECONDS = 10.0, 5.0
_START_SECONDS = 120.0
_WARM_UP_SHARE = 0.25
_MIB = 1 << 20


class Soak:
    """Trains, samples, and judges.

    Args:
        minutes: of sampling.
        workers: that stay.
        hidden: width of the model.
        pause: seconds that a worker waits after each step.
        directory: of the data and the logs.
    """

    def __init__(self, minutes: float, workers: int, hidden: int, pause: float, directory: Path) -> None:
        self._seconds, self._workers, self._hidden, self._pause = 60 * minutes, workers, hidden, pause
        self._directory = directory
        self._sample_seconds = min(_SAMPLE_SECONDS, self._seconds / _LEAST_SAMPLES)
        self._window_seconds = min(_WINDOW_SECONDS, self._seconds / _LEAST_WINDOWS)
        self._visit_seconds = min(_VISIT_SECONDS, self._seconds / _LEAST_VISITS)
        self.samples: list[Sample] = []
        self.latencies: list[tuple[float, float, float]] = []
        """Seconds since the beginning, median and 99th percentile of that window, milliseconds."""
        self.visits = {"left": 0, "killed": 0}
        self.failures: list[str] = []

    def run(self, progress: Progress) -> None:
        """Sample until the time is over, and there is enough to judge; longer only while all trainers live."""
        data = self._directory / "data"
        self._directory.mkdir(parents=True)
        servers = Servers(
            1,
            data,
            self._directory,
            down_mode="exact",
            lease_seconds=_LEASE_SECONDS,
            snapshot_seconds=_SNAPSHOT_SECONDS,
            keep_snapshots=2,
        )
        with ExitStack() as stack:
            stack.enter_context(servers)
            team = Team(servers.addresses[0], self._directory, self._workers, hidden=self._hidden, pause=self._pause)
            stack.callback(team.close)
            for trainer in team.living:
                trainer.answer("ms", _START_SECONDS)
            self._sample(servers, team, data, progress)
            for trainer in team.living:
                if trainer.process.poll() is not None:
                    self.failures.append(f"{trainer.name} ended with status {trainer.process.returncode}")
                elif trainer.end(_START_SECONDS):
                    self.failures.append(f"{trainer.name} did not leave in order")
            if any(servers.stop()):
                self.failures.append("the server did not end in order at SIGTERM")
        self.failures += [f"server log: {line}" for line in servers.errors()[:5]]

    def _sample(self, servers: Servers, team: Team, data: Path, progress: Progress) -> None:
        clock, began = threading.Event(), time.monotonic()
        visitor, arrived, window = team.begin(overlap=False), began, began
        try:
            while not self._is_over((now := time.monotonic()) - began, team.living):
                self.samples.append(look(servers.pid(0), data, now - began))
                if now - window >= self._window_seconds:
                    self._close_window(team.living, window, began)
                    window = now
                    progress.say(f"{now - began:.0f} of {self._seconds:.0f} s")
                if now - arrived >= self._visit_seconds:
                    self._end_visit(visitor)
                    visitor, arrived = team.begin(overlap=sum(self.visits.values()) % 4 > 1), now
                clock.wait(self._sample_seconds)
        finally:
            visitor.kill()

    def _is_over(self, seconds: float, trainers: Sequence[Trainer]) -> bool:
        if seconds < self._seconds:
            return False
        counted = [since for since, _, _ in self.latencies if since >= _WARM_UP_SHARE * self._seconds]
        return len(counted) >= LEAST_POINTS or any(trainer.process.poll() is not None for trainer in trainers)

    def _end_visit(self, visitor: Trainer) -> None:
        if sum(self.visits.values()) % 2:
            visitor.kill()
            self.visits["killed"] += 1
            return
        self.visits["left"] += 1
        if visitor.end(_START_SECONDS):
            self.failures.append(f"{visitor.name} did not leave in order")

    def _close_window(self, trainers: Sequence[Trainer], since: float, began: float) -> None:
        """Condense the round trips of the last seconds; those of trainers without overlap, which wait for them."""
        found = []
        for trainer in trainers:
            taken, trainer.round_trips = trainer.round_trips, []
            found += [ms for _, ms in taken] if not trainer.overlap else []
        if found:
            median, high = np.percentile(found, (50, 99))
            self.latencies.append((since - began, float(median), float(high)))

    def trends(self) -> list[Trend]:
        """Judge every curve; one that has too few points to be judged is a failure."""
        memory = [(sample.seconds, sample.memory_bytes / _MIB) for sample in self.samples]
        threads = [(sample.seconds, float(sample.threads)) for sample in self.samples]
        files = [(sample.seconds, float(sample.descriptors)) for sample in self.samples]
        disk = [(sample.seconds, sample.disk_bytes / _MIB) for sample in self.samples]
        median = [(seconds, ms) for seconds, ms, _ in self.latencies]
        high = [(seconds, ms) for seconds, _, ms in self.latencies]
        found = []
        for name, unit, points, share, least in (
            ("memory", "MiB", memory, 0.03, 4.0),
            ("threads", "", threads, 0.0, 2.0),
            ("file descriptors", "", files, 0.0, 3.0),
            ("data directory", "MiB", disk, 0.25, 2.0),
            ("push and pull, median", "ms", median, 0.30, 2.0),
            ("push and pull, 99th percentile", "ms", high, 1.0, 20.0),
        ):
            warm_up = _WARM_UP_SHARE * self._seconds
            try:
                found.append(trend(name, unit, points, share=share, least=least, warm_up=warm_up))
            except ValueError as error:
                self.failures.append(str(error))
        return found

    def drawings(self) -> list[plots.Plot]:
        """Draw every curve."""
        seconds = [sample.seconds for sample in self.samples]

        def curve(name: str, values: Sequence[float]) -> plots.Line:
            return plots.Line(name, list(zip(seconds, values, strict=True)), marked=False)

        return [
            plots.lines(
                "soak-memory",
                "Memory of the server",
                "resident; the warm-up is the first quarter",
                ("seconds", "MiB"),
                [curve("resident", [sample.memory_bytes / _MIB for sample in self.samples])],
            ),
            plots.lines(
                "soak-threads",
                "Threads and file descriptors of the server",
                "they breathe with the workers that come and go",
                ("seconds", "number"),
                [
                    curve("threads", [sample.threads for sample in self.samples]),
                    curve("descriptors", [sample.descriptors for sample in self.samples]),
                ],
            ),
            plots.lines(
                "soak-push-and-pull",
                "Push and pull",
                f"from the commit of a push until its reply is whole, over windows of {self._window_seconds:.2g} s",
                ("seconds", "ms"),
                [
                    plots.Line("median", [(s, ms) for s, ms, _ in self.latencies], marked=False),
                    plots.Line("99th percentile", [(s, ms) for s, _, ms in self.latencies], marked=False),
                ],
            ),
            plots.lines(
                "soak-disk",
                "Data directory",
                f"journal and two snapshots, one every {_SNAPSHOT_SECONDS:.0f} s",
                ("seconds", "MiB"),
                [curve("bytes", [sample.disk_bytes / _MIB for sample in self.samples])],
            ),
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; 0 where everything stays flat."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    end_on_sigterm()
    facts, started = machine.describe("verify.soak", given), time.monotonic()
    work: Path = options.output / "work"
    shutil.rmtree(work, ignore_errors=True)
    soak = Soak(options.minutes, options.workers, options.hidden, options.pause, work)
    with Progress(1) as progress:
        progress.section("soak")
        soak.run(progress)
    trends = soak.trends()
    flat = all(each.flat for each in trends) and not soak.failures
    title = "After the warm-up: the last third less the first"
    found = Section("soak", "Flat" if flat else "NOT FLAT", [Table(title, _COLUMNS, [_row(each) for each in trends])])
    found.plots = soak.drawings()
    visits, killed = sum(soak.visits.values()), soak.visits["killed"]
    found.notes = [f"{visits} workers came and went ({killed} were killed).", *(f"WRONG: {f}" for f in soak.failures)]
    found.figures = {
        "flat": flat,
        "failures": soak.failures,
        "visits": soak.visits,
        "trends": [asdict(each) | {"flat": each.flat} for each in trends],
        "samples": [asdict(sample) for sample in soak.samples],
        "latencies": [dict(zip(("seconds", "median_ms", "p99_ms"), each, strict=True)) for each in soak.latencies],
    }
    written = report.write(options.output, "Soak", facts, [found])
    if flat:
        shutil.rmtree(work)
    report.show(written, time.monotonic() - started)
    return 0 if flat else 1


_COLUMNS = ("figure", "level", "change", "allowed", "slope a minute", "")


def _row(each: Trend) -> tuple[str, ...]:
    unit = f" {each.unit}" if each.unit else ""
    return (
        each.name,
        f"{each.level:.1f}{unit}",
        f"{each.change:+.1f}{unit}",
        f"{each.allowed:.1f}{unit}",
        f"{each.slope:+.2f}{unit}",
        "flat" if each.flat else "GROWS",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verify.soak", description="Train for a while; nothing may grow.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long")
    parser.add_argument("--workers", type=int, default=3, help="that stay; every other one overlaps")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model: about its square in parameters")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that a worker waits after each step")
    parser.add_argument("--output", type=Path, default=Path("runs/soak"), help="where the figures go")
    return parser


if __name__ == "__main__":
    sys.exit(main())

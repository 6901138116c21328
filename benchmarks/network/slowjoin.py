"""Joining over bad lines: ``python -m benchmarks.network.slowjoin`` prints the table of docs/guide/slow-lines.md.

On each line a first worker uploads the model while a second one waits, the second one fetches it, and then a third
process takes the first one's place. In the middle of the upload and of the first download the line is cut for half a
minute. Needs root (network namespaces).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.network.longline import LongLine

_CUT_SECONDS = 30.0
_MOST_SECONDS = 3600.0
_SERVER, _WORKERS = 0, 1  # the hosts
_ADDRESS = f"{LongLine.address(_SERVER)}:50051"
_SERVE = (
    f"-m psservice serve --listen {_ADDRESS} --insecure --health-listen= --metrics-listen= --log-format text".split()
)


@dataclass(frozen=True)
class Joined:
    """One worker's way in.

    Attributes:
        what: which.
        seconds: it took.
        least_seconds: the model's bytes at the line's rate, and the time of the cut.
        bytes_share: bytes that passed on the line over those of the model.
    """

    what: str
    seconds: float
    least_seconds: float
    bytes_share: float


def work(parameters: int, name: str) -> None:
    """Be a worker: join, say so, and wait for the end of the input."""
    import logging

    import torch

    import psclient

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    torch.manual_seed(len(name))
    model = torch.nn.Linear(parameters // 1000 - 1, 1000)
    begun = time.monotonic()
    optimizer = psclient.GradientDropping(
        model.parameters(), lr=0.1, density=0.001, model=model, server=_ADDRESS, worker=name
    )
    print(json.dumps({"seconds": time.monotonic() - begun}), flush=True)
    for line in sys.stdin:
        if line.strip() == "step":
            model(torch.ones(1, parameters // 1000 - 1)).sum().backward()
            optimizer.step()
            print(json.dumps({"version": optimizer.version}), flush=True)
    optimizer.close()


def _on(line: LongLine, host: int) -> list[str]:
    """Return what a command begins with that runs on a host."""
    return ["ip", "netns", "exec", line.space(host)]


class _Worker:
    """A worker's process on the far side."""

    def __init__(self, line: LongLine, parameters: int, name: str, log: Path) -> None:
        command = [*_on(line, _WORKERS), sys.executable, "-m", "benchmarks.network.slowjoin", "--worker", name]
        with log.open("a") as stream:
            self._process = subprocess.Popen(
                [*command, "--parameters", str(parameters)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker has ended with status {self._process.wait(_MOST_SECONDS)}")
        found: dict[str, float] = json.loads(line)
        return found

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(bits: float, delay: float, loss: float, parameters: int, folder: Path) -> list[Joined]:
    """Return how the three join on one line."""
    nbytes = 4.0 * parameters
    least, found = 8 * nbytes / bits, []
    name = f"{bits / 1e6:g}-{delay * 1e3:g}"
    with (
        LongLine(2, bits, delay, loss) as line,
        (folder / f"server-{name}.log").open("w") as log,
        subprocess.Popen([*_on(line, _SERVER), sys.executable, *_SERVE], stderr=log) as server,
    ):
        workers: list[_Worker] = []
        pool = ThreadPoolExecutor(2)
        while "serving" not in Path(log.name).read_text():
            time.sleep(0.1)

        def join(worker: str) -> _Worker:
            workers.append(_Worker(line, parameters, worker, folder / f"worker-{worker}-{name}.log"))
            return workers[-1]

        def cut_half_way(passed: Callable[[], int]) -> None:
            before, end = passed(), time.monotonic() + _MOST_SECONDS
            while passed() - before < nbytes / 2:
                if time.monotonic() > end:
                    raise RuntimeError("half a model has not passed within an hour")
                time.sleep(0.1)
            line.cut = True
            time.sleep(_CUT_SECONDS)
            line.cut = False

        try:
            up, down = line.received(_SERVER), line.received(_WORKERS)
            first = join("w0")
            while line.received(_SERVER) - up < nbytes / 50:
                time.sleep(0.1)
            second = join("w1")
            answers = {pool.submit(worker.answer) for worker in (first, second)}
            cut_half_way(lambda: line.received(_SERVER))
            # Who has sent little before the cut may find another one at it afterwards.
            done, waiting = wait(answers, _MOST_SECONDS, FIRST_COMPLETED)
            seconds = done.pop().result()["seconds"]
            found.append(Joined("uploads", seconds, least + _CUT_SECONDS, (line.received(_SERVER) - up) / nbytes))
            cut_half_way(lambda: line.received(_WORKERS))
            waited = waiting.pop().result(_MOST_SECONDS)["seconds"]
            found.append(
                Joined(
                    "waits, downloads", waited, 2 * (least + _CUT_SECONDS), (line.received(_WORKERS) - down) / nbytes
                )
            )
            second.step()
            first.end()  # killed: its lease is still there when the next one comes
            down = line.received(_WORKERS)
            third = join("w0")
            seconds = third.answer()["seconds"]
            found.append(Joined("resumes", seconds, least, (line.received(_WORKERS) - down) / nbytes))
            third.step()
        finally:
            for worker in workers:
                worker.end()
            server.terminate()
            pool.shutdown()
    return found


def main() -> None:
    """Measure all lines, or be a worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=3_000_000)
    parser.add_argument("--mbits", type=float, nargs="+", default=[2.0, 4.0, 10.0])
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[50.0, 100.0], help="one way")
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--out", type=Path, default=Path("slowjoin"), help="folder for logs and figures")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.parameters, options.worker)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    print("| line | who | seconds | least | bytes / model |\n|---|---|---|---|---|")
    figures = {}
    for mbits in options.mbits:
        for delay in options.delays_ms:
            what = f"{mbits:g} Mbit/s, {delay:g} ms, {options.loss:.0%} loss"
            joined = measure(mbits * 1e6, delay / 1e3, options.loss, options.parameters, options.out)
            figures[what] = [asdict(each) for each in joined]
            for each in joined:
                row = f"{each.what} | {each.seconds:.0f} | {each.least_seconds:.0f} | {each.bytes_share:.2f}"
                print(f"| {what} | {row} |", flush=True)
    (options.out / "figures.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

"""How fast a version of a feed reaches many readers at two sites over slow lines, with relays and without."""

import http.server
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from benchmarks.harness.children import Child, begin
from benchmarks.harness.section import Plan, Section, Table
from benchmarks.network import lab
from benchmarks.workload.delta_codes import CODES, GAPS_AND_XOR
from psclient.publisher.publisher import Publisher
from psclient.reader.directory_sink import DirectorySink
from psclient.reader.follower import Follower
from psclient.reader.module_sink import ModuleSink
from pscore.reader.cut import Cut

KEY, TITLE = "fleet", "A version reaches many readers over slow lines"

_SOURCE, _SITES = 0, (1, 2)  # hosts
_RATES = (10e6, 100e6)  # bits a second, of each host's card
_READERS = 64
_CHANGED = 100  # one word of so many changes in a version
_CUT_SECONDS = 0.05
_CALIBRATION_SECONDS = 2.0
_WAIT_SECONDS = 600.0
_START_SECONDS = 120.0
_MOST_SECONDS = 60.0  # that whole models may take over the lines to be measured, and not computed


class _Arrangement(NamedTuple):
    """Readers, one of them at the first site, others at both; with a relay at each site, in directories or modules."""

    name: str
    readers: int
    with_relays: bool = False
    in_memory: bool = False


class _Version(NamedTuple):
    """Costs of a version: seconds from the call of ``publish`` to the first reader and to the last, bytes on lines."""

    first_seconds: float
    last_seconds: float
    line_bytes: int


class _Fleet(NamedTuple):
    """Readers at both sites: how long all took to have a first version, and each later version."""

    join_seconds: float
    versions: Sequence[_Version]

    @property
    def first_seconds(self) -> float:
        return statistics.median(version.first_seconds for version in self.versions)

    @property
    def last_seconds(self) -> float:
        return statistics.median(version.last_seconds for version in self.versions)

    @property
    def line_bytes(self) -> float:
        return statistics.median(version.line_bytes for version in self.versions)


def run(plan: Plan) -> Section:
    """Measure one reader, all of them without relays, and all of them behind a relay at each site."""
    section = Section(KEY, TITLE)
    reason = lab.unavailable()
    if reason:
        section.notes.append(f"Not measured: {reason}")
        return section
    readers = 8 if plan.quick else _READERS
    words = 1 << (19 if plan.quick else 22)
    for bits in _RATES[1:] if plan.quick else _RATES:
        _measure(plan, section, bits, words, readers)
    section.notes += [
        f"A feed of {words / 1e6:.1f} M bfloat16 words, of which 1 of {_CHANGED} changes in a version. Seconds are "
        "medians, from the call of publish until the version is in a reader's directory, on the disk, or in its "
        "module. All readers, relays and servers share this machine's cores and its disk, to which every directory "
        "writes the whole model in each version; the lines are token buckets between network namespaces.",
        "Over HTTP: the same bytes from one server of files, without what a reader then does with them; a difference "
        "as gaps, XOR and zstd. Computed means: bytes over the measured rate of a site's line.",
    ]
    return section


def _measure(plan: Plan, section: Section, bits: float, words: int, readers: int) -> None:
    with lab.Lab(1 + len(_SITES), bits) as line, ExitStack() as stack:
        plan.say(f"lines of {bits / 1e6:g} Mbit/s")
        rate = line.calibrate(_SOURCE, _SITES[0], _CALIBRATION_SECONDS)
        feed = _Feed(line, words, plan, stack)
        one_hop = _Arrangement("one hop", 1)
        one = feed.fleet(one_hop)
        fleets = {one_hop: one}
        computed: dict[_Arrangement, float] = {}
        for arrangement in _arrangements(readers, plan.quick):
            join_seconds = _line_seconds(2 * words, arrangement.readers, rate)
            if arrangement.with_relays or join_seconds < _MOST_SECONDS:
                fleets[arrangement] = feed.fleet(arrangement)
            else:
                computed[arrangement] = join_seconds
        by_http = {
            name: _over_http(line, nbytes, readers, rate)
            for name, nbytes in (("dense", 2 * words), ("a chain's difference", feed.code_bytes))
        }
    rows = [
        (
            arrangement.name,
            str(arrangement.readers),
            f"{fleet.join_seconds:.2f}",
            f"{fleet.first_seconds:.2f}",
            f"{fleet.last_seconds:.2f}",
            f"{fleet.last_seconds / one.last_seconds:.1f}",
            f"{fleet.line_bytes / 1e3:,.0f}",
            f"{fleet.line_bytes / one.line_bytes:.1f}",
        )
        for arrangement, fleet in fleets.items()
    ]
    for arrangement, seconds in computed.items():
        rows.append((arrangement.name, str(arrangement.readers), f"{seconds:.0f} computed", "", "", "", "", ""))
    for name, (seconds, is_measured) in by_http.items():
        shown = f"{seconds:.1f}{'' if is_measured else ' computed'}"
        rows.append((f"over HTTP, {name}", str(readers), "", "", shown, f"{seconds / one.last_seconds:.1f}", "", ""))
    heads = ("readers", "number", "join, s", "first, s", "last, s", "to one hop", "kB on the lines", "copies")
    title = f"Lines of {bits / 1e6:g} Mbit/s ({rate / 1e6:.1f} by TCP, calibrated)"
    section.tables.append(Table(title, heads, rows))
    section.figures[f"{bits / 1e6:g}"] = {"rate": rate} | {
        arrangement.name: {
            "readers": arrangement.readers,
            "join_seconds": fleet.join_seconds,
            "last_to_one_hop": fleet.last_seconds / one.last_seconds,
            "copies": fleet.line_bytes / one.line_bytes,
        }
        for arrangement, fleet in fleets.items()
    }


def _arrangements(readers: int, quick: bool) -> list[_Arrangement]:
    relayed = _Arrangement("a relay at each of two sites", readers, with_relays=True)
    if quick:
        return [relayed]
    return [
        _Arrangement("a relay between", 1, with_relays=True),
        _Arrangement("all from the source", readers),
        relayed,
        relayed._replace(name="the same, modules in memory", in_memory=True),
    ]


class _Feed:
    """A feed at the source's host, and its publisher; ends with the stack.

    Attributes:
        code_bytes: of the difference between two versions in the best of the others' codes.
    """

    def __init__(self, line: lab.Lab, words: int, plan: Plan, stack: ExitStack) -> None:
        self._line, self._plan, self._words = line, plan, words
        self._address = stack.enter_context(_server(line, _SOURCE, {}))
        self._publisher = stack.enter_context(
            Child("publisher", publish_on, self._address, line.space(_SOURCE), words, plan.seed)
        )
        begin([self._publisher], _START_SECONDS)
        self._version, self.code_bytes = self._publisher.hear(_START_SECONDS)
        stack.callback(self._publisher.tell, False)

    def fleet(self, arrangement: _Arrangement) -> _Fleet:
        """Have readers join, and follow some versions."""
        self._plan.say(arrangement.name)
        readers = arrangement.readers
        sites = _SITES[: min(readers, len(_SITES))]
        with ExitStack() as stack:
            addresses = dict.fromkeys(sites, self._address)
            if arrangement.with_relays:
                for site in sites:
                    addresses[site] = stack.enter_context(_server(self._line, site, {"relay_of": self._address}))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sparseps-fleet-"))
            words = self._words if arrangement.in_memory else 0
            children = [
                stack.enter_context(
                    Child(
                        f"readers at {site}",
                        follow_on,
                        addresses[site],
                        self._line.space(site),
                        folder,
                        site,
                        count,
                        words,
                    )
                )
                for site, count in zip(sites, _shares(readers, len(sites)), strict=True)
            ]
            begin(children, _START_SECONDS)
            joined = [child.hear(_WAIT_SECONDS) for child in children]
            self._next(children, sites)  # in which loops are loaded
            versions = [self._next(children, sites) for _ in range(2 if self._plan.quick else 7)]
            for child in children:
                child.tell(0)
        return _Fleet(_last(joined), versions)

    def _next(self, children: Sequence[Child], sites: Sequence[int]) -> _Version:
        before = self._received(sites)
        self._publisher.tell(True)
        began, self._version = self._publisher.hear(_WAIT_SECONDS)
        for child in children:
            child.tell(self._version)
        times = [moment for child in children for moment in child.hear(_WAIT_SECONDS)[1]]
        return _Version(min(times) - began, max(times) - began, self._received(sites) - before)

    def _received(self, sites: Sequence[int]) -> int:
        return sum(self._line.received(site) for site in sites)


def _line_seconds(nbytes: int, readers: int, rate: float) -> float:
    """Return how long the busiest site's line is at work if every reader gets so many bytes."""
    return 8 * nbytes * max(_shares(readers, len(_SITES))) / rate


def _last(told: Sequence[tuple[float, Sequence[float]]]) -> float:
    """Return the seconds from the first beginning to the last end that children have told."""
    return max(max(ends) for _, ends in told) - min(begun for begun, _ in told)


def _shares(count: int, parts: int) -> list[int]:
    return [len(range(part, count, parts)) for part in range(parts)]


@contextmanager
def _server(line: lab.Lab, host: int, settings: dict[str, object]) -> Iterator[str]:
    from benchmarks.campaign.processes import server  # late: campaigns are more than this section needs

    given = {"listen": f"{line.address(host)}:0", "insecure": True, "cut_seconds": _CUT_SECONDS, **settings}
    with server(given, line.space(host)) as address:
        yield address


class _Words(torch.nn.Module):
    """A module of the feed's one tensor."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(words, dtype=torch.bfloat16))


# In processes of their own, at one of the hosts


def publish_on(connection: Connection, address: str, space: str, words: int, seed: int) -> None:
    """Publish a model, and then a version each time that it is told to."""
    lab.enter(space)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(words, generator=generator).bfloat16()
    bits = values.view(torch.int16)

    def change() -> None:
        bits[torch.randint(words, (words // _CHANGED,), generator=generator)] += 1

    connection.send("ready")
    connection.recv()
    with Publisher(address) as publisher:
        version = publisher.publish({"w": values}).version
        before = bits.clone()
        change()
        code_bytes = CODES[GAPS_AND_XOR](before.numpy().view("uint16"), bits.numpy().view("uint16"))
        connection.send((version, code_bytes))
        while connection.recv():
            change()
            began = time.monotonic()
            connection.send((began, publisher.publish({"w": values}).version))


def follow_on(connection: Connection, address: str, space: str, folder: str, site: int, count: int, words: int) -> None:
    """Follow with so many readers, a directory each, or a module of so many words; answer when each had a version."""
    lab.enter(space)
    seen: list[dict[int, float]] = [{} for _ in range(count)]
    changed = threading.Condition()

    def noting(number: int) -> Callable[[Cut], None]:
        def note(cut: Cut) -> None:
            with changed:
                seen[number][cut.version] = time.monotonic()
                changed.notify_all()

        return note

    def times(version: int) -> tuple[float, list[float]]:
        with changed:
            changed.wait_for(lambda: all(any(each >= version for each in mine) for mine in seen), _WAIT_SECONDS)
            return began, [min(moment for each, moment in mine.items() if each >= version) for mine in seen]

    connection.send("ready")
    connection.recv()
    began = time.monotonic()
    with ExitStack() as stack:
        for number in range(count):
            sink = ModuleSink(_Words(words)) if words else DirectorySink(f"{folder}/{site}-{number}")
            stack.enter_context(Follower(address, sink, on_cut=noting(number)))
        connection.send(times(0))
        while version := connection.recv():
            connection.send(times(version))


# Others: files over HTTP


def _over_http(line: lab.Lab, nbytes: int, readers: int, rate: float) -> tuple[float, bool]:
    """Return the seconds until the last of all readers has a file, and whether that was measured."""
    computed = _line_seconds(nbytes, readers, rate)
    if computed > _MOST_SECONDS:
        return computed, False
    with ExitStack() as stack:
        address = line.address(_SOURCE)
        server = stack.enter_context(Child("files", serve_on, address, line.space(_SOURCE), nbytes))
        port = server.hear(_START_SECONDS)
        children = [
            stack.enter_context(Child(f"downloads at {site}", download_on, address, port, line.space(site), count))
            for site, count in zip(_SITES, _shares(readers, len(_SITES)), strict=True)
        ]
        begin(children, _START_SECONDS)
        took = _last([child.hear(_WAIT_SECONDS) for child in children])
        server.tell()
    return took, True


def serve_on(connection: Connection, host: str, space: str, nbytes: int) -> None:
    """Serve one file of so many bytes over HTTP until told to end."""
    lab.enter(space)
    data = bytes(nbytes)

    class Files(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(nbytes))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((host, 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        connection.send(server.server_address[1])
        connection.recv()
        server.shutdown()
        thread.join()


def download_on(connection: Connection, host: str, port: int, space: str, count: int) -> None:
    """Download the file with so many readers at the same time; answer when the last one has it."""
    lab.enter(space)

    def download() -> None:
        lab.enter(space)
        with socket.create_connection((host, port), _WAIT_SECONDS) as stream:
            stream.sendall(b"GET / HTTP/1.0\r\n\r\n")
            while stream.recv(1 << 16):
                pass

    connection.send("ready")
    connection.recv()
    began = time.monotonic()
    threads = [threading.Thread(target=download) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.send((began, [time.monotonic()]))

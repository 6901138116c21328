"""What befalls the publisher of a feed, and the file that it keeps."""

import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from verify.failpoint.draws import drawn
from verify.traffic.publisher import PLACES

if TYPE_CHECKING:
    from verify.feeds import Feeds

_UP_SECONDS = 0.0, 2.0
_LOAD_FIRST_SHARE, _LOAD_SECONDS, _MOST_FIRST = 0.8, 6.0, 15
_DIE_SECONDS, _MOST_BEFORE_DEATH = 10.0, 3
_TAKE_OVER_SECONDS, _TOGETHER_SECONDS = (3.0, 6.0), (1.0, 4.0)
_MOST_COPIES = 6
_DAMAGES = "truncated", "flipped by a bit", "replaced by an older one", "without its description"


class FeedPublisherFaults:
    """Draws faults until it is told to end.

    Args:
        feeds: the campaign.
        rng: draws.
    """

    def __init__(self, feeds: "Feeds", rng: random.Random) -> None:
        self._feeds, self._rng = feeds, rng
        self._publishers, self._faults = feeds.publishers, feeds.result.faults
        self._copies: list[Path] = []

    def strike(self) -> None:
        """Do them, one by one; a publisher is at work when this returns."""
        ways = drawn(
            [
                (2, self._kill_publisher),
                (4, self._have_publisher_die),
                (2, self._stop_publisher),
                (2, self._begin_second),
                (3, self._spoil_baseline),
                (2, self._publish_older),
            ],
            self._rng,
        )
        while not self._feeds.is_over.wait(self._rng.uniform(*_UP_SECONDS)):
            if self._rng.random() < _LOAD_FIRST_SHARE:
                self._feeds.await_publications(self._rng.randint(1, _MOST_FIRST), _LOAD_SECONDS)
            next(ways)()

    def _kill_publisher(self) -> None:
        self._end_publisher()
        self._publishers.begin()

    def _end_publisher(self) -> None:
        """Kill the publisher, and keep a copy of its baseline, as a backup would."""
        self._publishers.kill()
        self._faults["publishers killed"] += 1
        baseline = self._publishers.baseline
        if _about(baseline).exists():
            copy = baseline.with_name(f"old-{self._faults['publishers killed']}")
            shutil.copyfile(baseline, copy)
            shutil.copyfile(_about(baseline), _about(copy))
            self._copies = [*self._copies, copy][-_MOST_COPIES:]

    def _have_publisher_die(self) -> None:
        """Begin a publisher that kills itself at a place, and another one then."""
        self._end_publisher()
        place = self._rng.choice(PLACES)
        self._publishers.begin(dies=place, after=self._rng.randrange(_MOST_BEFORE_DEATH))
        if self._publishers.has_died(_DIE_SECONDS):
            self._faults[f"publishers killed, version {place}"] += 1
        self._end_publisher()
        self._publishers.begin()

    def _stop_publisher(self) -> None:
        """Let the publisher stand still for longer than its lease, while another one takes over."""
        self._faults["publishers stopped for longer than a lease"] += 1
        self._publishers.stop()
        self._begin_other()
        self._feeds.pause(*_TAKE_OVER_SECONDS)
        self._publishers.resume()
        self._feeds.pause(*_TOGETHER_SECONDS)
        self._publishers.end_second()

    def _begin_second(self) -> None:
        """Begin another publisher beside the first, by accident: with a file of its own, or with the same one."""
        self._faults["second publishers"] += 1
        if self._rng.random() < 0.5:
            self._publishers.begin_second(self._older(), self._publishers.baseline)
        else:
            self._begin_other()
        self._feeds.pause(*_TAKE_OVER_SECONDS)
        self._publishers.end_second()

    def _begin_other(self) -> None:
        self._publishers.begin_second(self._older(), self._publishers.baseline.with_name("other-baseline"))

    def _spoil_baseline(self) -> None:
        """Have the next publisher find a file that is damaged, gone, or of an older version."""
        self._end_publisher()
        baseline = self._publishers.baseline
        size = baseline.stat().st_size if baseline.exists() else 0
        kind = self._rng.choice(
            ("truncated", "flipped by a bit", "replaced by an older one", "without its description")
        )
        if kind == "replaced by an older one" and self._copies:
            copy = self._rng.choice(self._copies)
            shutil.copyfile(copy, baseline)
            shutil.copyfile(_about(copy), _about(baseline))
        elif kind == "truncated" and size:
            os.truncate(baseline, self._rng.randrange(size))
        elif kind == "flipped by a bit" and size:
            _flip(baseline, self._rng.randrange(size), self._rng.randrange(8))
        else:
            kind = _DAMAGES[-1]
            _about(baseline).unlink(missing_ok=True)
        self._faults[f"baselines {kind}"] += 1
        self._publishers.begin()

    def _publish_older(self) -> None:
        """Have the publisher go on from a model that it published before: older words become a newer version."""
        self._end_publisher()
        self._faults["publishers begun from an older checkpoint"] += 1
        self._publishers.begin(self._older())

    def _older(self) -> str:
        return self._rng.choice([*self._publishers.books()[0]] or [""])


def _about(baseline: Path) -> Path:
    return Path(f"{baseline}.json")


def _flip(path: Path, byte: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        (old,) = file.read(1)
        file.seek(byte)
        file.write(bytes([old ^ 1 << bit]))

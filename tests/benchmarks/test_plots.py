"""What is drawn can be told apart: on light and dark ground, without each kind of receptor, and without colour."""

import json
from itertools import combinations

import numpy as np
import pytest

from benchmarks.harness import machine, plots, report
from benchmarks.harness.section import Section, Table

GROUNDS = ("#ffffff", "#16181c")

SIGHTS = {
    "full": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB."""

TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
TOLD_APART = 15
"""Distance in CIE 1976 L*a*b*; about 2 can just be noticed side by side."""


def linear(colour):
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    scaled = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(1)
    x, y, z = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
def test_any_two_colours_differ_for_every_sight(sight):
    seen = [lab(np.array(SIGHTS[sight]) @ linear(colour)) for colour in plots.PALETTE]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) >= TOLD_APART


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("colour", plots.PALETTE)
def test_the_palette_can_be_seen_on_light_and_dark_ground(colour, ground):
    """WCAG asks for 3:1 of what is drawn."""
    darker, lighter = sorted(float(TO_XYZ[1] @ linear(each)) for each in (colour, ground))
    assert (lighter + 0.05) / (darker + 0.05) >= 3


def test_more_series_than_colours_differ_still():
    assert len({plots.style_of(number) for number in range(3 * len(plots.PALETTE))}) == 3 * len(plots.PALETTE)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("count", [2, 7, len(plots.PALETTE)])
def test_no_two_series_share_a_colour_nor_marker_and_dash(count, marked):
    curves = [plots.Line(str(i), [(1, 1), (2, i)], dashed=marked and i % 2 == 1, marked=marked) for i in range(count)]
    lines = plots.lines("key", "t", "c", ("x", "y"), curves).figure.axes[0].get_lines()
    assert len({line.get_color() for line in lines}) == count
    if marked:
        assert len({line.get_marker() for line in lines}) == count
        assert [line.get_linestyle() for line in lines[:2]] == ["-", "--"]
    else:
        assert len({line.get_linestyle() for line in lines}) == min(count, 4)


def test_more_series_than_colours_are_refused():
    curves = [plots.Line(str(i), [(1, i)]) for i in range(len(plots.PALETTE) + 1)]
    with pytest.raises(ValueError, match="too many"):
        plots.lines("key", "t", "c", ("x", "y"), curves)


def test_a_report_has_its_tables_pictures_and_figures(tmp_path):
    table = Table("Rows of text", ("what", "ms"), [("step", "1"), ("– part", "0.5")])
    curves = [plots.Line("a", [(1, 2), (4, 8)]), plots.Line("c", [(1, 1), (4, 3)], dashed=True)]
    drawn = [plots.lines("speed", "Speed", "What it says.", ("workers", "times"), curves, log_x=True)]
    drawn.append(plots.bars("bars", "Bars", "Long and short.", "steps", [("one", 1.0), ("two", 2.0)]))
    sections = [Section("first", "First", [table], drawn, ["A note."], {"x": 1}), Section("second", "Second")]
    facts = machine.describe("benchmarks.bench", ["--quick"])
    page, data, *pictures = report.write(tmp_path, "Title", facts, sections)
    assert json.loads(data.read_text())["figures"]["first"]["x"] == 1
    assert [path.name for path in pictures] == ["speed.png", "bars.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    text = page.read_text()
    for part in ("# Title", "python -m benchmarks.bench --quick", "| – part | 0.5 |", "](speed.png)", "* A note."):
        assert part in text, part

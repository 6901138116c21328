"""The table of the selection section: a ratio follows from the times that it stands beside."""

import re

import torch

from benchmarks.harness.section import Plan, Section
from benchmarks.sections import selection
from pscore.model.layout import layout_of


def numbers(cell):
    """The median, the least and the most of a cell."""
    return [float(found) for found in re.findall(r"[\d.]+", cell)]


def test_a_ratio_is_one_of_the_times_that_the_table_shows():
    section = Section(selection.KEY, selection.TITLE)
    plan = Plan(True, layout_of([("w", torch.ones(2))], []), "two", 0.01, 3, 1, 0, lambda text: None)
    selection._measure(plan, section, 50_000, 0.01)
    (table,) = section.tables
    rows = {row[0]: row for row in table.rows}
    copy = None
    checked = 0
    for text, times, cell, _ in rows.values():
        median, low, high = numbers(times)
        if not cell:
            copy = (median, low, high)
            continue
        _, least, most = numbers(cell)
        assert least >= 0.98 * low / copy[2], text  # three digits are shown
        assert most <= 1.02 * high / copy[1], text
        checked += 1
    assert checked == 4

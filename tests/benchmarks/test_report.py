"""The page needs nothing but itself, says what was run, and draws the same figures the same way."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from benchmarks.harness import plots
from benchmarks.harness.machine import describe
from benchmarks.harness.section import Section, Table
from benchmarks.report import write
from benchmarks.report.page import page

GROUNDS = ("#ffffff", "#16181c")
VOID = {"meta", "br", "link", "img"}


def draw(title="Speed & size"):
    curves = [plots.Line("a < b", [(1, 2), (4, 8)]), plots.Line("c", [(1, 1), (4, 3)], dashed=True)]
    return plots.lines(title, "What it says.", ("workers", "times"), curves, log_x=True)


@pytest.fixture
def sections():
    table = Table("Rows <of> text", ("what", "ms"), [("step", "1"), ("  part & rest", "0.5")])
    bars = plots.bars("Bars", "Long and short.", "steps", [("one", 1.0), ("two", 2.0)])
    return [Section("first", "First", [table], [draw(), bars], ["A note."], {"x": 1}), Section("second", "Second")]


class Reader(HTMLParser):
    """Checks nesting, collects ids and references."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.references, self.text = [], [], [], ""

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src", "data", "srcset", "action"):
                self.references.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


def test_the_page_is_whole_and_refers_to_nothing_outside(sections):
    text = page(describe(["--quick"]), sections)
    reader = read(text)
    assert not reader.open
    assert len(set(reader.ids)) == len(reader.ids)
    inside = reader.references + re.findall(r"url\(([^)]*)\)", text)
    assert inside
    assert all(reference.startswith("#") and reference[1:] in reader.ids for reference in inside)
    assert not re.search(r"https?:|@import|<script", text)


def test_the_page_names_command_machine_and_date(sections):
    facts = describe(["--quick", "--only", "<wire>"])
    text = read(page(facts, sections)).text
    assert facts["command"] in text
    assert facts["date"] in text
    assert facts["machine"]["cpu"] in text
    for part in ("Rows <of> text", "part & rest", "A note.", "Long and short.", "Speed & size"):
        assert part in text


def test_everything_is_written(sections, tmp_path):
    written = write(tmp_path, describe([]), sections)
    assert [path.name for path in written] == ["report.html", "report.md", "bench.json"]
    assert json.loads(written[2].read_text())["figures"]["first"]["x"] == 1
    assert "&nbsp;&nbsp;part & rest | 0.5 |" in written[1].read_text()


def test_a_drawing_is_the_same_each_time_and_is_xml():
    drawn = draw()
    assert drawn == draw()
    assert ElementTree.fromstring(drawn.svg).get("aria-label") == "Speed & size"
    assert "currentColor" in drawn.svg


def test_drawings_share_no_id():
    first, second = (set(re.findall(r'\bid="([^"]*)"', draw(title).svg)) for title in ("One", "Two"))
    assert not first & second

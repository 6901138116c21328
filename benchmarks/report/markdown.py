"""The report as Markdown."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.machine import sentences
from benchmarks.harness.section import Section


def markdown(facts: dict[str, Any], sections: Sequence[Section]) -> str:
    """Write everything but the plots."""
    lines = ["# Benchmarks", ""]
    for sentence in sentences(facts):
        lines += [sentence + "  "]
    for number, section in enumerate(sections, start=1):
        lines += ["", f"## {number}. {section.title}"]
        for table in section.tables:
            lines += [
                "",
                f"**{table.title}**",
                "",
                _line(table.columns),
                _line(("---", *["---:"] * (len(table.columns) - 1))),
            ]
            lines += [_line(_indented(row)) for row in table.rows]
        lines += ["", *(f"* {note}" for note in section.notes)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _indented(row: tuple[str, ...]) -> tuple[str, ...]:
    first = row[0]
    return (first.replace("  ", "&nbsp;&nbsp;", 1) if first.startswith("  ") else first, *row[1:])

"""The report: tables on the terminal, the same as Markdown, and every figure as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.machine import sentences
from benchmarks.section import Section, Table


def show(facts: dict[str, Any], sections: Sequence[Section], console: Console) -> None:
    """Print everything."""
    for line in sentences(facts):
        console.print(line, markup=False, highlight=False)
    for number, section in enumerate(sections, start=1):
        console.print(f"\n{number}. {section.title}", style="bold", markup=False)
        for table in section.tables:
            console.print(_rich(table))
        for note in section.notes:
            console.print(f"- {note}", markup=False, highlight=False, style="dim")


def write(directory: Path, facts: dict[str, Any], sections: Sequence[Section]) -> tuple[Path, Path]:
    """Write ``bench.json`` and ``report.md``; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = {section.key: {"seconds_taken": section.seconds, **section.figures} for section in sections}
    data, text = directory / "bench.json", directory / "report.md"
    data.write_text(json.dumps({**facts, "figures": figures}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    text.write_text(markdown(facts, sections), encoding="utf-8")
    return data, text


def markdown(facts: dict[str, Any], sections: Sequence[Section]) -> str:
    """Return the report as Markdown."""
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


def _rich(table: Table) -> RichTable:
    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE)
    for i, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if i else "left", no_wrap=bool(i))
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _indented(row: tuple[str, ...]) -> tuple[str, ...]:
    first = row[0]
    return (first.replace("  ", "&nbsp;&nbsp;", 1) if first.startswith("  ") else first, *row[1:])

"""Reports: ``report.md`` with its pictures, ``report.json`` with every figure, and the same on the terminal."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.harness.machine import sentences
from benchmarks.harness.section import Section

_WIDTH = 250
"""Of what is shown where there is no terminal."""


def write(directory: Path, title: str, facts: dict[str, Any], sections: Sequence[Section]) -> list[Path]:
    """Write everything into a directory, which is made; return the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = {section.key: {"seconds_taken": section.seconds, **section.figures} for section in sections}
    page, data = directory / "report.md", directory / "report.json"
    page.write_text(markdown(title, facts, sections), encoding="utf-8")
    data.write_text(json.dumps({**facts, "figures": figures}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [page, data, *(plot.save(directory) for section in sections for plot in section.plots)]


def show(written: Sequence[Path], seconds: float) -> None:
    """Print the report and where everything is."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(Markdown(written[0].read_text(encoding="utf-8")))
    console.print(f"\n{seconds:.0f} s; written: {', '.join(map(str, written))}", markup=False, highlight=False)


def markdown(title: str, facts: dict[str, Any], sections: Sequence[Section]) -> str:
    """Return what was measured and on what, with links to the pictures beside it."""
    lines = [f"# {title}", "", *(f"* {sentence}" for sentence in sentences(facts))]
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        for plot in section.plots:
            lines += [f"![{plot.title}]({plot.key}.png)", "", plot.caption, ""]
        for table in section.tables:
            lines += [f"**{table.title}**", "", _line(table.columns)]
            lines += [_line(("---", *["---:"] * (len(table.columns) - 1)))]
            lines += [*map(_line, table.rows), ""]
        lines += [f"* {note}" for note in section.notes]
    return "\n".join(lines).rstrip("\n") + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"

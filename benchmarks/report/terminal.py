"""The report on the terminal."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.harness.machine import sentences
from benchmarks.harness.section import Section, Table


def show(facts: dict[str, Any], sections: Sequence[Section], console: Console) -> None:
    """Print everything but the plots."""
    for line in sentences(facts):
        console.print(line, markup=False, highlight=False)
    for number, section in enumerate(sections, start=1):
        console.print(f"\n{number}. {section.title}", style="bold", markup=False)
        for table in section.tables:
            console.print(rich_table(table))
        for note in section.notes:
            console.print(f"- {note}", markup=False, highlight=False, style="dim")


def rich_table(table: Table) -> RichTable:
    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE)
    for i, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if i else "left", no_wrap=bool(i))
    for row in table.rows:
        drawn.add_row(*row)
    return drawn

"""The report as one HTML file that needs nothing else: styles and plots are inside."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import sentences
from benchmarks.harness.section import Plot, Section, Table

_STYLE = Path(__file__).with_name("style.css")


def page(facts: dict[str, Any], sections: Sequence[Section]) -> str:
    return "\n".join(_page(facts, sections)) + "\n"


def _page(facts: dict[str, Any], sections: Sequence[Section]) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">\n<title>sparseps benchmarks</title>'
    yield f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n<main>\n<h1>Benchmarks</h1>"
    command, *machine = sentences(facts)
    yield f"<p><code>{escape(facts['command'])}</code>{escape(command.partition('`,')[2])}</p>"
    yield "<p>" + "<br>\n".join(escape(sentence) for sentence in machine) + "</p>"
    yield "<nav><ol>"
    for section in sections:
        yield f'<li><a href="#{section.key}">{escape(section.title)}</a></li>'
    yield "</ol></nav>"
    for number, section in enumerate(sections, start=1):
        yield f'<section id="{section.key}">\n<h2>{number}. {escape(section.title)}</h2>'
        for plot in section.plots:
            yield from _plot(plot)
        for table in section.tables:
            yield from _table(table)
        yield "<ul>"
        for note in section.notes:
            yield f"<li>{escape(note)}</li>"
        yield f"</ul>\n<p class='taken'>{section.seconds:.0f} s of {section.budget:.0f} s</p>\n</section>"
    yield "</main>\n</body>\n</html>"


def _plot(plot: Plot) -> Iterator[str]:
    yield f"<figure>\n<h3>{escape(plot.title)}</h3>\n{plot.svg}\n<figcaption>{escape(plot.caption)}</figcaption>"
    yield "</figure>"


def _table(table: Table) -> Iterator[str]:
    yield f"<div class='wide'>\n<table>\n<caption>{escape(table.title)}</caption>\n<thead><tr>"
    for column in table.columns:
        yield f'<th scope="col">{escape(column)}</th>'
    yield "</tr></thead>\n<tbody>"
    for first, *rest in table.rows:
        part = " class='part'" if first.startswith("  ") else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        yield f'<tr><th scope="row"{part}>{escape(first.strip())}</th>{cells}</tr>'
    yield "</tbody>\n</table>\n</div>"

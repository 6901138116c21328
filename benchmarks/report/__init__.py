"""The report of a run: the same sections on the terminal, as Markdown, as a page, and every figure as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.section import Section
from benchmarks.report.markdown import markdown
from benchmarks.report.page import page
from benchmarks.report.terminal import show

__all__ = ["show", "write"]


def write(
    directory: Path, facts: dict[str, Any], sections: Sequence[Section], figures_name: str = "bench.json"
) -> list[Path]:
    """Write ``report.html``, ``report.md`` and every figure as JSON; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = {section.key: {"seconds_taken": section.seconds, **section.figures} for section in sections}
    texts = {
        "report.html": page(facts, sections),
        "report.md": markdown(facts, sections),
        figures_name: json.dumps({**facts, "figures": figures}, indent=2, ensure_ascii=False) + "\n",
    }
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in texts]

"""What Prometheus brings along for checking: promtool, and the expressions that a dashboard asks for."""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
RULES_TEST = ROOT / "deploy" / "prometheus" / "rules_test.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"

_UNPACKED = Path("~/.cache/sparseps/tools/promtool").expanduser()
_GRAFANA_VARIABLES = {"$__rate_interval": "5m", "$run": "r", "$shard": ".*"}


@functools.cache
def _found() -> str | None:
    return shutil.which("promtool") or (str(_UNPACKED) if _UNPACKED.is_file() else None)


needs_promtool = pytest.mark.skipif(
    _found() is None,
    reason=f"promtool is neither on PATH nor {_UNPACKED}; it is in Debian's package prometheus",
)


def promtool(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    program = _found()
    assert program is not None
    return subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True, timeout=380)


def panels() -> list[dict[str, Any]]:
    """Every panel of the dashboard, rows too."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def asked(expression: str) -> str:
    """An expression as Grafana sends it."""
    for name, value in _GRAFANA_VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """(title of the panel, expression as it is sent)."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield panel["title"], asked(target["expr"])


def anchors(page: Path) -> set[str]:
    """The anchors of a Markdown page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}

"""The documents say what the code does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("reference", ["settings", "api"])
def test_a_generated_reference_is_up_to_date(reference):
    command = [sys.executable, "-m", f"tools.generate_{reference}_reference", "--check"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr


def test_every_make_target_that_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named
    assert named <= targets


@pytest.mark.parametrize(
    "page",
    sorted([page for folder in (ROOT, ROOT / "docs", ROOT / "examples" / "loops") for page in folder.glob("*.md")]),
    ids=lambda p: p.name,
)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_protocol_page_lists_every_reason_under_its_status():
    from pscore.wire.errors import ErrorCode

    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", (ROOT / "docs" / "protocol.md").read_text(), re.MULTILINE)
    told = {reason: status for status, cell in rows for reason in re.findall(r"`([A-Z_]+)`", cell)}
    assert told == {reason.name: reason.status_name for reason in ErrorCode}

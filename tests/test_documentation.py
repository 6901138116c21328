"""The documents say what the code does."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import psclient

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples" / "loops").glob("*.md")])
PROTOCOL = ROOT / "docs/reference/protocol.md"
WALKS = re.search(
    r"<!-- walks: begin -->(.*)<!-- walks: end -->", (ROOT / "docs/internals/architecture.md").read_text(), re.DOTALL
)
WALK_LINES = [line for line in WALKS[1].splitlines() if line and not line.startswith("#")] if WALKS else []


@pytest.mark.parametrize("reference", ["settings", "metrics"])
def test_a_generated_reference_is_up_to_date(reference):
    command = [sys.executable, "-m", f"tools.generate_{reference}_reference", "--check"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr


def test_every_make_target_that_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        text = linked.read_text() if linked.suffix == ".md" else ""
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
        anchors |= set(re.findall(r"^::: (.*)$", text, re.MULTILINE))
        assert not anchor or anchor in anchors, f"{target}#{anchor}"


def test_the_site_leads_to_every_page():
    listed = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_the_api_has_every_public_name_of_the_worker():
    shown = re.findall(r"^::: psclient\.(\w+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    assert sorted([*shown, "ClientSettings", "__version__"]) == sorted(psclient.__all__)


def test_the_errors_page_has_every_error_that_a_caller_can_see():
    page = (ROOT / "docs/reference/errors.md").read_text()
    kinds = {name: kind for name, kind in vars(psclient.errors).items() if isinstance(kind, type)}
    shown = {name for name, kind in kinds.items() if issubclass(kind, psclient.errors.SparsepsError)}
    assert {name for name in shown - {"SparsepsError"} if f"`{name}`" not in page} == set()


def test_the_protocol_page_lists_every_reason_under_its_status():
    from pscore.wire.errors import ErrorCode

    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", PROTOCOL.read_text(), re.MULTILINE)
    told = {reason: status for status, cell in rows for reason in re.findall(r"`([A-Z_]+)`", cell)}
    assert told == {reason.name: reason.status_name for reason in ErrorCode}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda p: p.name)
def test_a_file_or_folder_that_a_page_names_exists(page):
    folders = "pscore|psclient|psservice|tests|tools|verify|benchmarks|deploy|examples|proto"
    named = re.findall(rf"`((?:{folders})/[\w./-]*\w(?:\.\w+|/))`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_architecture_lists_every_room():
    page = (ROOT / "docs/internals/architecture.md").read_text()
    rooms = {path.parent for package in ("pscore", "psclient", "psservice") for path in (ROOT / package).glob("*/*.py")}
    assert [str(room) for room in rooms if f"`{room.relative_to(ROOT)}/`" not in page] == []


def test_the_architecture_has_a_walk_for_a_push_and_one_for_a_pull():
    assert WALKS is not None
    assert re.findall(r"^### (.*)$", WALKS[1], re.MULTILINE) == ["A push", "A pull"]
    assert len(WALK_LINES) > 20


@pytest.mark.parametrize("line", WALK_LINES, ids=lambda line: line[:60])
def test_a_line_of_a_walk_names_a_function_that_exists(line):
    found = re.match(r"\d+\. `([\w/]+\.py):(\w+)` ", line)
    assert found, f"docs/internals/architecture.md, not of the form 'N. `path.py:function` …': {line}"
    path, name = found.groups()
    assert (ROOT / path).is_file(), f"docs/internals/architecture.md, no such file: {line}"
    tree = ast.parse((ROOT / path).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name in functions, f"docs/internals/architecture.md, no such function in {path}: {line}"

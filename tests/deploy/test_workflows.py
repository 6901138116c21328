"""The workflows: what they may do, when they publish, and that what they call exists."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import release_check

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]
ON_A_TAG = "github.event_name == 'push' && github.ref_type == 'tag'"
RELEASE = WORKFLOWS["release"]["jobs"]


def steps(workflow: str, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = WORKFLOWS[workflow]["jobs"][job]["steps"]
    return found


def is_for_tags(workflow: str, job: str) -> bool:
    return WORKFLOWS[workflow]["jobs"][job].get("if") == ON_A_TAG


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_read_and_no_more_unless_a_job_says_so(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_a_job_that_may_write_is_for_tags_or_writes_images(workflow, job):
    writes = {k for k, v in WORKFLOWS[workflow]["jobs"][job].get("permissions", {}).items() if v == "write"}
    assert not writes or is_for_tags(workflow, job) or (job == "images" and writes == {"packages"})


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_every_action_has_a_version_and_no_checkout_leaves_a_token_behind(workflow, job):
    for step in steps(workflow, job):
        if "uses" in step:
            assert re.fullmatch(r"(actions|docker)/[\w-]+@(v\d+|[0-9a-f]{40})", step["uses"])
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_scripts_get_what_others_may_write_by_the_environment(workflow, job):
    assert not [step["run"] for step in steps(workflow, job) if "${{" in step.get("run", "")]


def test_nothing_is_published_but_by_a_tag_that_names_a_version():
    assert WORKFLOWS["release"][True]["push"] == {"tags": ["v*"]}  # YAML 1.1 reads `on` as true
    assert RELEASE["images"]["env"]["PUBLISH"] == f"${{{{ {ON_A_TAG} }}}}"
    for job in RELEASE:
        for step in steps("release", job):
            text = step.get("run", "") + step.get("uses", "")
            if re.search(r"gh release|deploy-pages", text):
                assert is_for_tags("release", job)
            if re.search("login-action", text):
                assert step["if"] == "env.PUBLISH == 'true'"
            if "--push" in text:
                assert re.search(r'if \[ "\$PUBLISH" = true \]; then\n(?: .*\n)* +output=\(--push', text)


def test_a_release_waits_for_the_wheel_the_bare_environments_the_images_and_the_site():
    assert set(RELEASE["publish"]["needs"]) == {"wheel", "bare", "images", "site"}
    assert "bare" in RELEASE["images"]["needs"]


def test_wheels_are_tried_on_every_python_that_the_project_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.split(" :: ")[-1] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert set(RELEASE["bare"]["strategy"]["matrix"]["python"]) == set(release_check.PYTHONS) == named


def test_what_the_workflows_call_exists():
    text = " ".join(step.get("run", "") for workflow, job in JOBS for step in steps(workflow, job))
    assert (ROOT / ".ci" / "run").exists()
    for path in re.findall(r"deploy/[\w./-]+\w", text):
        assert (ROOT / path).exists() or path.endswith("overlays"), path
    targets = set(re.findall(r'^target "([\w-]+)"', (ROOT / "deploy" / "docker-bake.hcl").read_text(), re.MULTILINE))
    assert targets == {"common", "server", "worker", "server-gpu"}
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "deploy" / "Containerfile").read_text(), re.MULTILINE))
    assert (
        set(re.findall(r'^ +target += "([\w-]+)"', (ROOT / "deploy" / "docker-bake.hcl").read_text(), re.MULTILINE))
        <= stages
    )

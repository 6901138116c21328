"""The built manifests, as tests look at them: built once an overlay, and pods found wherever a kind keeps them."""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.container_test.manifests import expanded

ROOT = Path(__file__).parent.parent.parent
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
SECURE = [name for name in OVERLAYS if name != "cpu-dev"]

Object = dict[str, Any]

POD_TEMPLATES = {
    "StatefulSet": ["spec.template"],
    "Job": ["spec.template"],
    "CronJob": ["spec.jobTemplate.spec.template"],
    "JobSet": ["spec.replicatedJobs.*.template.spec.template"],
    "TrainingRuntime": ["spec.template.spec.replicatedJobs.*.template.spec.template"],
}
"""Where each kind keeps the templates of its pods."""


def build(overlay: str) -> tuple[Object, ...]:
    """Return the objects of an overlay; skips the test where nothing here can build it."""
    return _built(KUBERNETES / "overlays" / overlay)


@functools.cache
def _built(folder: Path) -> tuple[Object, ...]:
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize"]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build"]
    else:
        pytest.skip("neither kubectl nor kustomize is installed (.ci/install-kubectl installs kubectl)")
    built = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    return tuple(yaml.load_all(built.stdout, yaml.CSafeLoader))


def suffix(overlay: str) -> str:
    """Return what the names of a run have behind them."""
    text = (KUBERNETES / "overlays" / overlay / "kustomization.yaml").read_text(encoding="utf-8")
    return str(yaml.safe_load(text).get("nameSuffix", ""))


def sizes(overlay: str) -> dict[str, str]:
    """Return the numbers of an overlay, from the one place where they stand."""
    folder = KUBERNETES / "overlays" / overlay
    if not (folder / "sizes.yaml").exists():
        (inner,) = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
        folder = folder / inner
    return dict(yaml.safe_load((folder / "sizes.yaml").read_text(encoding="utf-8"))["data"])


def one(overlay: str, kind: str, name: str) -> Object:
    """Return an object by its name; a run's suffix and a hash that kustomize has appended are no part of it."""
    name = name.removesuffix(suffix(overlay)) + suffix(overlay)
    named = re.compile(rf"{re.escape(name)}(-[a-z0-9]{{10}})?")
    found = [e for e in build(overlay) if e["kind"] == kind and named.fullmatch(e["metadata"]["name"])]
    if len(found) > 1:
        found = [each for each in found if each["metadata"]["name"] == name]
    assert len(found) == 1, f"{overlay} has {len(found)} of {kind}/{name}"
    return found[0]


def pods(overlay: str) -> Iterator[tuple[str, Object]]:
    """Yield every pod template of an overlay with the kind that it belongs to."""
    for each in build(overlay):
        for template in templates_of(each):
            yield each["kind"], template


def templates_of(each: Object) -> Iterator[Object]:
    """Yield the pod templates of an object."""
    for path in POD_TEMPLATES.get(each["kind"], []):
        yield from _at(each, path.split("."))


def _at(value: Any, path: list[str]) -> Iterator[Any]:
    if not path:
        yield value
    elif path[0] == "*":
        for each in value:
            yield from _at(each, path[1:])
    else:
        yield from _at(value[path[0]], path[1:])


def server(overlay: str) -> Object:
    """Return the pod template of the shards."""
    template: Object = one(overlay, "StatefulSet", "psservice")["spec"]["template"]
    return template


def container(template: Object) -> Object:
    """Return a pod template's only container."""
    (found,) = template["spec"]["containers"]
    return dict(found)


def workers(overlay: str) -> list[Object]:
    """Return the pod templates of workers."""
    return [template for kind, template in pods(overlay) if kind not in ("StatefulSet", "CronJob")]


def environment(overlay: str, template: Object, shard: int = 0) -> dict[str, str]:
    """Return what a container finds in its environment, as the kubelet fills it in."""
    spec = container(template)
    found: dict[str, str] = {}
    for source in spec.get("envFrom", []):
        if "configMapRef" in source:  # Secrets are the operator's
            found |= one(overlay, "ConfigMap", source["configMapRef"]["name"]).get("data", {})
    before: dict[str, str] = {}
    for variable in spec.get("env", []):
        if "value" in variable:  # $(NAME) is of a variable further up in this list, and else stays as it is
            value = expanded(variable["value"], before)
        else:
            value = _filled_in(overlay, variable, spec, shard)
        before[variable["name"]] = value
    return found | before


def _filled_in(overlay: str, variable: Object, spec: Object, shard: int) -> str:
    source = variable["valueFrom"]
    if "configMapKeyRef" in source:
        key = source["configMapKeyRef"]
        return str(one(overlay, "ConfigMap", key["name"])["data"][key["key"]])
    if "resourceFieldRef" in source:
        assert source["resourceFieldRef"]["resource"] == "requests.cpu"
        requested = str(spec["resources"]["requests"]["cpu"])
        return str(-(-int(requested[:-1]) // 1000)) if requested.endswith("m") else requested
    assert source == {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    return str(shard)

"""From the manifests of an overlay to what ``podman kube play`` understands: pods and claims, one an ordinal.

podman knows no StatefulSet, Job or Service. This does what their controllers would do, and changes no other field but:
the ports of a container are left out (podman would publish them on the machine), and images are never pulled.
"""

import copy
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.container_test.machine import TestFailedError

Document = dict[str, Any]

_INDEX_LABEL = "apps.kubernetes.io/pod-index"
_REFERENCE = re.compile(r"\$\((\w+)\)")


@dataclass(frozen=True)
class PlayedPod:
    """A pod with what it needs.

    Attributes:
        name: of the pod.
        container: name of its first container.
        image: of that container.
        aliases: other names under which the network finds it.
        documents: what ``podman kube play`` is given, in order.
    """

    name: str
    container: str
    image: str
    aliases: tuple[str, ...]
    documents: tuple[Document, ...]

    @property
    def container_name(self) -> str:
        """What podman calls the container."""
        return f"{self.name}-{self.container}"

    @property
    def text(self) -> str:
        """The documents as YAML."""
        return yaml.safe_dump_all(self.documents)


@dataclass(frozen=True)
class Plan:
    """The pods of an overlay: the shards in order, and the workers."""

    servers: tuple[PlayedPod, ...]
    workers: tuple[PlayedPod, ...]


def kustomize(overlay: Path) -> list[Document]:
    """Return the documents of an overlay, as ``kubectl kustomize`` builds them.

    Raises:
        TestFailedError: it does not build.
    """
    built = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, timeout=120)
    if built.returncode != 0:
        raise TestFailedError(f"kubectl kustomize {overlay}: {built.stderr.strip()}")
    return [document for document in yaml.safe_load_all(built.stdout) if document]


def expanded(value: str, before: dict[str, str]) -> str:
    """Return a variable's value with ``$(NAME)`` replaced; ``before``: those that stand before it. Others stay."""
    return _REFERENCE.sub(lambda match: before.get(match[1], match[0]), value)


def plan(documents: list[Document]) -> Plan:
    """Render the pods of the StatefulSet and of the workers' Job.

    Raises:
        TestFailedError: there is not one of each.
    """
    shared = [document for document in documents if document["kind"] == "ConfigMap"]
    stateful = _the_one(documents, "StatefulSet")
    job = _the_one(documents, "Job")
    return Plan(tuple(_shards(stateful, shared)), tuple(_workers(job, shared)))


def _the_one(documents: list[Document], kind: str) -> Document:
    found = [document for document in documents if document["kind"] == kind]
    if len(found) != 1:
        raise TestFailedError(f"the overlay has {len(found)} documents of kind {kind}, not one")
    return found[0]


def _shards(stateful: Document, shared: list[Document]) -> Iterator[PlayedPod]:
    name, spec = stateful["metadata"]["name"], stateful["spec"]
    for ordinal in range(spec["replicas"]):
        pod = _pod(f"{name}-{ordinal}", spec["template"], {_INDEX_LABEL: str(ordinal)})
        claims = []
        for template in spec.get("volumeClaimTemplates", []):
            claim = copy.deepcopy(template) | {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
            volume = claim["metadata"]["name"]
            claim["metadata"]["name"] = f"{volume}-{name}-{ordinal}"
            pod["spec"].setdefault("volumes", []).append(
                {"name": volume, "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
            )
            claims.append(claim)
        service = spec["serviceName"]
        yield _played(pod, (*shared, *claims), (service, f"{name}-{ordinal}.{service}"))


def _workers(job: Document, shared: list[Document]) -> Iterator[PlayedPod]:
    name, spec = job["metadata"]["name"], job["spec"]
    for index in range(spec["completions"]):
        pod = _pod(f"{name}-{index}", spec["template"], {})
        pod["spec"]["restartPolicy"] = "Never"  # one that fails fails the test
        for container in pod["spec"]["containers"]:
            container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        yield _played(pod, tuple(shared), ())


def _pod(name: str, template: Document, labels: dict[str, str]) -> Document:
    pod = copy.deepcopy(template) | {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"] = {"name": name, "labels": {**template.get("metadata", {}).get("labels", {}), **labels}}
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        container.pop("ports", None)
        container["imagePullPolicy"] = "Never"
        before: dict[str, str] = {}
        for variable in container.get("env", []):
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            if field is not None:
                variable["value"] = _field(field, pod["metadata"])
                del variable["valueFrom"]
            if "value" in variable:  # which podman does not expand
                before[variable["name"]] = variable["value"] = expanded(variable["value"], before)
    return pod


def _field(path: str, metadata: Document) -> str:
    """Return what the downward API gives for a field of a pod's metadata."""
    if path == "metadata.name":
        return str(metadata["name"])
    label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
    if label is None or label[1] not in metadata["labels"]:
        raise TestFailedError(f"the pod {metadata['name']} has no {path}")
    return str(metadata["labels"][label[1]])


def _played(pod: Document, others: tuple[Document, ...], aliases: tuple[str, ...]) -> PlayedPod:
    first = pod["spec"]["containers"][0]
    return PlayedPod(pod["metadata"]["name"], first["name"], first["image"], aliases, (*others, pod))

"""Writes deploy/kubernetes/base/psservice.yaml from the settings class; ``--check`` only compares.

The file is what the ConfigMap of the shards holds: every setting, explained, at the value that it has on Kubernetes.
Run this after changing a setting: ``make references``.
"""

import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import yaml

from psservice.settings import ServerSettings
from tools.generated import keep

TARGET = Path(__file__).parent.parent / "deploy" / "kubernetes" / "base" / "psservice.yaml"

ON_KUBERNETES: dict[str, Any] = {
    "listen": "0.0.0.0:50051",
    "health_listen": "0.0.0.0:50052",
    "metrics_listen": "0.0.0.0:9464",
    "data_dir": "/data",
    "log_format": "json",
}
"""What differs from the default in a pod of its own."""

OF_THE_POD = ("config", "shard_index", "num_shards", "coordinator", "compute_threads")
"""What the pod is told by its environment: where this file is, which shard it is, how many CPUs it has."""

OF_A_CHILD = ("ready_fd", "parent_pid")
"""What only a process says that starts a server as its child."""

HEAD = """\
# The settings of the shards. Generated from psservice/settings.py by tools/generate_configmap.py; do not edit.
# Overlays set PSSERVICE_<SETTING> in the environment of the StatefulSet, which wins over this file.
#
# Set for each pod by the StatefulSet: """

WIDTH = 118


def configuration() -> str:
    lines = [HEAD + ", ".join(OF_THE_POD) + "."]
    for name, field in ServerSettings.model_fields.items():
        if name in (*OF_THE_POD, *OF_A_CHILD):
            continue
        value = ON_KUBERNETES.get(name, field.default)
        comment = textwrap.wrap(str(field.description), WIDTH, break_on_hyphens=False)
        lines += ["", *(f"# {line}" for line in comment), yaml.safe_dump({name: value}).rstrip()]
    return "\n".join(lines) + "\n"


def validate(text: str) -> None:
    """Load the file as a shard does; raises what the settings class raises where a value is wrong."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        loaded = ServerSettings(config=Path(file.name), insecure=True)  # who may call is an overlay's to say
    for name, value in yaml.safe_load(text).items():
        if name != "insecure" and loaded.model_dump(mode="json")[name] != value:
            raise ValueError(f"{name} loads as {getattr(loaded, name)!r}, not {value!r}")


def main() -> int:
    """Write or compare; return 1 where the file is out of date."""
    text = configuration()
    validate(text)
    return keep(TARGET, text)


if __name__ == "__main__":
    sys.exit(main())

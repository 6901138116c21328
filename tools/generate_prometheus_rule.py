"""Writes the PrometheusRule of Kubernetes from deploy/prometheus/rules.yaml; ``--check`` only compares.

The Prometheus operator takes rules as an object whose ``spec`` is a file of rules, and kustomize cannot put one into
the other. Run this after changing a rule: ``make references``.
"""

import sys
import textwrap
from pathlib import Path

import yaml

from tools.generated import keep

DEPLOY = Path(__file__).parent.parent / "deploy"
SOURCE = DEPLOY / "prometheus" / "rules.yaml"
TARGET = DEPLOY / "kubernetes" / "components" / "monitoring" / "prometheusrule.yaml"

HEAD = """\
# Generated from deploy/prometheus/rules.yaml by tools/generate_prometheus_rule.py; do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: psservice
  labels: {app.kubernetes.io/name: sparseps}
spec:
"""


def rule(rules: str) -> str:
    """Return the object that holds a file of rules, comments and all."""
    text = HEAD + textwrap.indent(rules, "  ")
    if yaml.safe_load(text)["spec"] != yaml.safe_load(rules):
        raise ValueError(f"{SOURCE.name} cannot be indented: a rule's text would change")
    return text


def main() -> int:
    """Write or compare; return 1 where the file is out of date."""
    return keep(TARGET, rule(SOURCE.read_text()))


if __name__ == "__main__":
    sys.exit(main())

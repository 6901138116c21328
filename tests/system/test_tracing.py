"""A worker's step is one trace, over worker and servers, however often a call is repeated; and nothing where it is off."""

import collections
import os
import subprocess
import sys

import pytest

from tests.system.scripts import ROOT

pytest.importorskip("opentelemetry.proto.collector.trace.v1", reason="the extra sparseps[tracing] is not installed")


TOKEN = "a-token-that-nobody-may-see"

WORKER = """
import sys
import psclient
from psclient.connection import Connection
from tests.system.tools import QUICK, make_data, make_model, train_step

server, overlap, tracing = sys.argv[1], sys.argv[2] == "overlap", sys.argv[3] == "on"
model = make_model()
settings = QUICK.model_copy(update={"tracing": tracing})
optimizer = psclient.DGS(
    model.parameters(), lr=0.1, model=model, server=server, worker="anna", overlap=overlap, settings=settings
)
for _ in range(2):
    train_step(model, optimizer, *make_data())
print("between", flush=True)
sys.stdin.readline()
train_step(model, optimizer, *make_data())
optimizer.pull()
optimizer.close()
print("opentelemetry" in sys.modules, flush=True)
"""


def start_worker(server, collector, mode="plain", tracing="on"):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, server, mode, tracing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **collector.environment, "PSCLIENT_TOKEN": TOKEN},
    )


def trees(spans):
    """The spans of each whole step, by the step's number."""
    by_trace = collections.defaultdict(list)
    for span in spans:
        by_trace[span.trace].append(span)
    roots = {span.attributes["sparseps.step"]: span for span in spans if span.name == "step" and not span.parent}
    return {step: by_trace[root.trace] for step, root in roots.items()}


def below(tree, parent):
    return sorted((span for span in tree if span.parent == parent.span), key=lambda span: (span.name, span.instance))


def one(tree, name, **attributes):
    (found,) = [
        span
        for span in tree
        if span.name == name
        and all(span.attributes.get(f"sparseps.{key}") == value for key, value in attributes.items())
    ]
    return found

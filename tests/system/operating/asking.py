"""Run an operator's command, and ask a server what it says of itself."""

import json
import re
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cli import main as cli
from psservice.operator.client import call


def status(address):
    return call(address, "GetStatus", pb.GetStatusRequest(), 30.0)


def versions(server):
    return [status(address).version for address in server.addresses]


def run(capsys, *words):
    """Run a command in this process; return its exit status and what it has printed."""
    capsys.readouterr()
    code = cli.main([*words])
    return code, capsys.readouterr()


def run_json(capsys, *words):
    code, printed = run(capsys, *words, "--json")
    return code, json.loads(printed.out)


def metric(metrics_address, line):
    text = urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=30).read().decode()
    found = re.search(rf"^{re.escape(line)} (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def refused(metrics_address, reason):
    """How many calls a shard has refused for a reason."""
    return metric(metrics_address, f'psservice_refusals_total{{reason="{reason}"}}')


def looks(metrics_address):
    """How many times a shard has told its status."""
    return metric(metrics_address, 'psservice_call_seconds_count{rpc="GetStatus"}')


def health(address):
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

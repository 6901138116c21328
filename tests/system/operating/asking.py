"""Run an operator's command, and ask a server what it says of itself."""

import json
import re
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cli import main as cli
from psservice.ctl.client import call


def status(address):
    """What the server at an address says of itself; of a :class:`LocalServer`, its first shard."""
    return call(getattr(address, "addresses", [address])[0], "GetStatus", pb.GetStatusRequest(), 30.0)


def worker_ids(address):
    return [worker.worker_id for worker in status(address).workers]


def versions(server):
    return [status(address).version for address in server.addresses]


def run(capsys, *words):
    """Run a command in this process; return its exit status and what it has printed."""
    capsys.readouterr()
    code = cli.main([*words])
    return code, capsys.readouterr()


def run_json(capsys, *words):
    code, printed = run(capsys, *words, "--output=json")
    return code, json.loads(printed.out)


def metrics(metrics_address):
    """The page of the metrics of a shard; of a :class:`LocalServer`, of its first one."""
    address = getattr(metrics_address, "metrics_addresses", [metrics_address])[0]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as page:
        return page.read().decode()


def metric(metrics_address, line):
    found = re.search(rf"^{re.escape(line)} (\S+)", metrics(metrics_address), re.MULTILINE)
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

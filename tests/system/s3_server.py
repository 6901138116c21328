"""An S3-compatible store on loopback: OpenStack Swift with its S3 interface, one process for each of its servers.

Its authentication knows one user; without memcached it goes on and logs that.
"""

import getpass
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from verify.cluster.servers import free_ports

USER, SECRET = "test:tester", "testing"
_START_SECONDS = 60.0
_SWIFT = """\
[swift-hash]
swift_hash_path_prefix = prefix
swift_hash_path_suffix = suffix
[storage-policy:0]
name = gold
default = yes
"""
_COMMON = """\
[DEFAULT]
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
"""
_STORAGE = """\
[pipeline:main]
pipeline = {role}-server
[app:{role}-server]
use = egg:swift#{role}
"""
_PROXY = """\
[pipeline:main]
pipeline = catch_errors cache listing_formats bulk s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
allow_account_management = true
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
"""


@contextmanager
def s3_server(folder: Path):
    """Serve S3 from a folder; yield the endpoint's URL."""
    (folder / "devices" / "d1").mkdir(parents=True)
    (folder / "swift.conf").write_text(_SWIFT)
    ports = dict(zip(("account", "container", "object", "proxy"), free_ports(4), strict=True))
    with ExitStack() as running:
        for role, port in ports.items():
            settings = (_PROXY if role == "proxy" else _STORAGE).format(role=role)
            (folder / f"{role}.conf").write_text(
                _COMMON.format(folder=folder, port=port, user=getpass.getuser()) + settings
            )
            if role != "proxy":
                _make_ring(folder, role, port)
            log = running.enter_context((folder / f"{role}.log").open("wb"))
            command = [_program(f"swift-{role}-server"), str(folder / f"{role}.conf"), "-v"]
            process = subprocess.Popen(command, stdout=log, stderr=log)
            running.callback(process.wait)
            running.callback(process.kill)
        for role, port in ports.items():
            _await(port, folder / f"{role}.log")
        yield f"http://127.0.0.1:{ports['proxy']}"


def _program(name):
    return str(Path(sys.executable).parent / name)


def _make_ring(folder, role, port):
    builder = str(folder / f"{role}.builder")
    for words in (["create", "4", "1", "1"], ["add", f"r1z1-127.0.0.1:{port}/d1", "1"], ["rebalance"]):
        subprocess.run([_program("swift-ring-builder"), builder, *words], check=True, capture_output=True, cwd=folder)


def _await(port, log):
    """Wait until a server takes connections."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(log.read_text())

"""Hosts with addresses of their own, on this machine: network namespaces around a bridge that has one of its own too.

Nothing of it touches the network of the machine: there is no way from one to the other.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

FILES = Path("/etc/netns")  # ip-netns(8): what stands here for a namespace is its /etc
_SECONDS = 30


def why_not() -> str:
    """Say what is missing on this machine; nothing where all is there."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "iptables") if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian's iproute2 and iptables)"
    trial = f"sparseps-{os.getpid()}-trial"
    if subprocess.run(["ip", "netns", "add", trial], capture_output=True, timeout=_SECONDS).returncode:
        return "this machine lets nobody make a network namespace"
    _ip("netns", "delete", trial)
    return ""


class Network:
    """Hosts that reach one another, and nothing else.

    Args:
        hosts: their names here, as ``worker-0``.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        """Name them; they are made when the block is entered."""
        self._bridge = f"sparseps-{os.getpid()}-bridge"
        self._namespaces = {host: f"sparseps-{os.getpid()}-{host}" for host in hosts}
        self._used = 0
        self.addresses: dict[str, str] = {}

    def __enter__(self) -> "Network":
        """Make the hosts, each with an address."""
        try:
            _ip("netns", "add", self._bridge)
            _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._bridge, "link", "set", "bridge", "up")
            for number, namespace in enumerate(self._namespaces.values()):
                files = FILES / namespace
                files.mkdir(parents=True)
                (files / "hosts").write_text("127.0.0.1 localhost\n")
                (files / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
                _ip("netns", "add", namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
                port = f"port-{number}"
                _ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._bridge)
                _ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")
                _ip("-n", namespace, "link", "set", "eth0", "up")
            for host in self._namespaces:
                self.give_address(host, self.new_address())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what still runs in them, and take them away."""
        for namespace in (*self._namespaces.values(), self._bridge):
            found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=_SECONDS)
            for pid in found.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=_SECONDS)
            shutil.rmtree(FILES / namespace, ignore_errors=True)

    def new_address(self) -> str:
        """Return an address that no host has had."""
        self._used += 1
        return f"10.91.0.{self._used}"

    def give_address(self, host: str, address: str) -> None:
        """Give a host an address, instead of the one that it has; the names do not know yet."""
        self.take_address(host)
        _ip("-n", self._namespaces[host], "address", "add", f"{address}/24", "dev", "eth0")
        self.addresses[host] = address
        for namespace in self._namespaces.values():  # whoever had it is forgotten
            _ip("-n", namespace, "neighbour", "flush", "all")

    def take_address(self, host: str) -> None:
        """Take a host's address away: it falls silent, with every connection open."""
        _ip("-n", self._namespaces[host], "address", "flush", "dev", "eth0", "scope", "global")
        self.addresses.pop(host, None)

    def name(self, names: Mapping[str, Sequence[str]]) -> None:
        """Let names stand for addresses, on every host."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, all_ in names.items() for address in all_)]
        for namespace in self._namespaces.values():  # in place: a new file would not be seen through the mount
            with (FILES / namespace / "hosts").open("r+") as file:
                file.write("\n".join(lines) + "\n")
                file.truncate()

    def unplug(self, host: str) -> None:
        """Take the link down."""
        _ip("-n", self._namespaces[host], "link", "set", "eth0", "down")

    def plug(self, host: str) -> None:
        """Bring the link up again."""
        _ip("-n", self._namespaces[host], "link", "set", "eth0", "up")

    def block(self, host: str) -> None:
        """Drop what comes and what goes, without a word."""
        for chain in ("INPUT", "OUTPUT"):
            self._iptables(host, "-A", chain, "-j", "DROP")

    def unblock(self, host: str) -> None:
        """Let everything through again."""
        self._iptables(host, "-F")

    def _iptables(self, host: str, *arguments: str) -> None:
        _ip("netns", "exec", self._namespaces[host], "iptables", *arguments)

    def inside(self, host: str, module: str) -> list[str]:
        """Return what a command begins with that runs a module on a host."""
        return [sys.executable, "-m", "tests.system.inside", self._namespaces[host], module]


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_SECONDS)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"

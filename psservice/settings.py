"""The server's settings: one frozen class, filled from flags, then ``PSSERVICE_*``, then a YAML file, then defaults."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator
from pydantic_settings import CliSettingsSource, SettingsConfigDict

from pscore.config import LayeredSettings, setting, unknown_setting
from pscore.names import LONGEST_NAME, model_file_fault
from pscore.net.addresses import AddressError, expand
from pscore.net.channels import is_loopback
from pscore.selection import DEFAULT_DENSE_BELOW, DEFAULT_SELECTOR, SELECTORS
from pscore.units import LONGEST_SECONDS
from pscore.wire.codecs.names import VALUE_CODECS
from pscore.wire.frames import DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES

ENVIRONMENT_PREFIX = "PSSERVICE_"
MOST_SHARDS_OF_A_HOST = 64
"""A process each, with threads and memory of its own; a larger number is a slip."""

# The placeholder of a flag's value in --help, by the end of the flag's name, or else by the type of the setting.
_UNITS = {
    "listen": "HOST:PORT",
    "-seconds": "DURATION",
    "-bytes": "SIZE",
    "--device": "DEVICE",
    "-dir": "DIR",
    "-of": "HOST:PORT",
}
_KINDS = {"str": "NAME", "int": "N", "float": "NUMBER", "Path": "FILE"}


_GROUPS = {
    "config": "settings from a file",
    "listen": "addresses, and who may call",
    "device": "device and shards",
    "init": "the run",
    "relay_of": "relay, or standby, of another server",
    "down_mode": "replies and buffers",
    "end_versions": "the end of the run",
    "data_dir": "durability",
    "max_staleness": "staleness",
    "cut_seconds": "limits",
    "log_level": "log and process",
}
"""Titles of groups of settings in --help, by the first setting of each."""

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_SOURCES = {"relay": "--relay-of", "standby": "--standby-of"}
_NOT_OF_RELAYS = ("init", "run_id", "end_versions", "end_samples", "final_model")


class SettingsError(ValueError):
    """A setting is unknown or out of range; the message names it."""


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """How many entries (as a multiple of the shard's) the log of changes has, and ``λ`` of DC-ASGD (0: off)."""

    ledger_multiple: float = 1.0
    delay_compensation: float = 0.0


class ServerSettings(LayeredSettings):
    """Run a server. Each setting is also PSSERVICE_<SETTING> in the environment and a key of the YAML file.

    With --check-config nothing is started: the command tells what a start would find, and whether it would succeed.
    """

    failure = SettingsError
    others = ("endpoints",)

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True
    )

    listen: str = setting("127.0.0.1:50051", "HOST:PORT for workers; port 0 picks a free one from 20000 to 29999")
    health_listen: str = setting("127.0.0.1:0", "HOST:PORT of the plaintext health service; port 0 as above; or empty")
    metrics_listen: str = setting("127.0.0.1:0", "HOST:PORT of metrics and status page; port 0 as above; or empty")
    tls_cert: Path | None = setting(None, "the server's certificate chain (PEM); turns on TLS for workers")
    tls_key: Path | None = setting(None, "key (PEM) of that certificate")
    tls_client_ca: Path | None = setting(None, "CA (PEM) of callers' certificates (mutual TLS); refuses others")
    tokens: Path | None = setting(None, "file of bearer tokens, ROLE TOKEN [WORKER] a line; refuses others")
    certificate_roles: Path | None = setting(
        None,
        "file of roles of callers' certificates, ROLE NAME [WORKER] a line: a DNS name or URI of the certificate; "
        "refuses others; without it, and without --tokens, each certificate is an admin's",
    )
    tls_server_name: str = setting(
        "",
        "name in the certificates of the servers that this one calls: shard 0 (--coordinator), a source (--of); empty: "
        "that of their address",
    )
    insecure: bool = setting(False, "allow unauthenticated callers from beyond loopback, also in plaintext")
    reflection: Literal["auto", "on", "off"] = setting("auto", "gRPC reflection; auto is on for loopback only")

    device: str = setting("auto", "device of the parameters: auto, cpu, cuda or cuda:N; shards take GPUs in turn")
    shard_index: int = setting(0, "index of this shard; shard 0 coordinates", ge=0)
    num_shards: int = setting(1, "number of shards of the model", ge=1)
    coordinator: str = setting(
        "",
        "where every other shard follows shard 0: HOST:PORT of its --listen, or of it and its standby, with a slash "
        "between; --shards sets it",
        max_length=300,
    )
    coordinator_ca: Path | None = setting(None, "CA (PEM) of shard 0's certificate; by default that of --tls-client-ca")
    shards: int = setting(
        1,
        "serve all shards of the model from this host, a process each, with ports in a row: shard i has the ports of "
        "--listen and --metrics-listen plus i; one health port serves all. Limits of memory and threads are a shard's",
        ge=1,
        le=MOST_SHARDS_OF_A_HOST,
    )
    init: Path | None = setting(None, "model to start from: a safetensors file, or the data directory of another run")
    init_checkpoint: str = setting("", "checkpoint of that directory; empty for its last version")

    run_id: str = setting("", "name of the run; empty for a random one", max_length=LONGEST_NAME)
    relay_of: str = setting(
        "",
        "relay the versions of this server for readers: HOST:PORT of any or of each shard; psservice relay --of",
        max_length=1 << 16,
    )
    relay_type: Literal["run", "float16", "bfloat16"] = setting(
        "run", "in which type a relay holds fp32 parameters: as the run has them, or in half of the bytes"
    )
    standby_of: str = setting(
        "",
        "stand by for this server: HOST:PORT of any or of each shard; psservice standby --of",
        max_length=1 << 16,
    )
    promote_after_seconds: float = setting(
        0.0,
        "a standby serves by itself once its server has not answered for so long, if that server's answers waited for "
        "the standby (--replicate ack); 0: by psservice promote alone",
        ge=0,
    )
    source_ca: Path | None = setting(
        None, "CA (PEM) of the certificate of the server that is relayed or stood by for; turns on TLS to it"
    )
    source_cert: Path | None = setting(None, "own certificate (PEM) for mutual TLS to that server")
    source_key: Path | None = setting(None, "its key (PEM)")
    source_token_file: Path | None = setting(
        None, "file that holds a bearer token for that server; a standby needs an admin's"
    )

    down_mode: Literal["auto", "exact", "topk"] = setting("auto", "replies to pulls; auto: top-k beyond --exact-limit")
    down_selector: str = setting(DEFAULT_SELECTOR, "selector of the entries of a top-k reply: " + ", ".join(SELECTORS))
    down_value_type: str = setting("fp32", "type of the values in a top-k reply: " + ", ".join(VALUE_CODECS))
    down_density: float = setting(0.01, "density of a top-k reply", gt=0, le=1)
    down_dense_below: int = setting(
        DEFAULT_DENSE_BELOW, "tensors with fewer elements are whole in top-k replies, as dense_below for pushes", ge=0
    )
    exact_limit: float = setting(0.10, "share of changed elements above which auto leaves exact replies", gt=0, le=1)
    buffers: Literal["sync", "local", "none"] = setting(
        "sync", "BatchNorm statistics: averaged and adopted, averaged but kept local, or never sent"
    )
    buffer_period_steps: int = setting(20, "steps of a worker between two exchanges of buffers", ge=1)
    end_versions: int = setting(0, "end the run at this version of shard 0; 0 for no such end", ge=0)
    end_samples: int = setting(0, "end the run after this many samples; 0 for no such end", ge=0)
    final_model: Path | None = setting(None, "safetensors file to write when the run ends")

    data_dir: Path | None = setting(None, "directory of snapshots and journals, which must survive the server")
    durability: Literal["journal", "snapshot", "none"] = setting(
        "journal",
        "journal writes every push to the data directory before the acknowledgement, and takes snapshots; "
        "snapshot takes snapshots only; none writes nothing",
    )
    fsync: Literal["always", "interval", "never"] = setting(
        "interval",
        "when the operating system must write the journal to the disk: before each acknowledgement, "
        "periodically, or at its own time; a killed server loses no push with any of them, a power failure loses none "
        "with always",
    )
    fsync_interval_seconds: float = setting(1.0, "period of --fsync interval", gt=0)
    snapshot_seconds: float = setting(300.0, "time between two snapshots", gt=0)
    journal_bytes: int = setting(1 << 30, "take a snapshot early when the journal has grown by this much", ge=1 << 20)
    keep_snapshots: int = setting(3, "snapshots to keep; the journal is kept from the oldest of them on", ge=1)
    replicate: Literal["behind", "ack"] = setting(
        "behind",
        "what answers wait for beside the disk: nothing, and a standby follows as fast as it can; or ack: until a "
        "standby has what they tell of, so that a lost machine loses nothing that was acknowledged",
    )
    recover: Literal["strict", "last-good"] = setting(
        "strict",
        "if acknowledged data is damaged or missing: strict refuses to start, last-good returns to the "
        "last version before the damage and starts a new generation",
    )

    max_staleness: int = setting(0, "refuse staler pushes, which return to the residual; 0 for no limit", ge=0)
    ssp_bound: int = setting(0, "pushes that a worker may be ahead of the slowest live one; 0 for no bound", ge=0)
    delay_compensation: float = setting(0.0, "lambda of DC-ASGD (paper: 0.04); 0: none", ge=0, allow_inf_nan=False)

    cut_seconds: float = setting(
        0.2, "shortest time between two versions for readers (psclient follow); made while they ask", gt=0, le=3600
    )
    lease_seconds: float = setting(
        15.0, "time after which a worker's lease ends without renewal", ge=0.5, le=LONGEST_SECONDS
    )
    chunk_bytes: int = setting(
        DEFAULT_CHUNK_BYTES, "largest payload of a chunk", ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES
    )
    ledger_multiple: float = setting(1.0, "entries of the change log, as a multiple of the shard's elements", gt=0)
    apply_queue_limit: int = setting(256, "pushes and pulls at work or waiting; pushes beyond are refused, BUSY", ge=1)
    memory_bytes: int = setting(
        0,
        "memory of replicas' images (up to a half; replies are exact beyond), and of pushes, uploads and answers (BUSY "
        "beyond); 0: 144 an element, 7 GiB at least",
        ge=0,
    )
    stream_idle_seconds: float = setting(60.0, "cancel a call whose client does not send or read for so long", gt=0)
    stream_seconds: float = setting(3600.0, "cancel a call still waiting for its client this long after it began", gt=0)
    rpc_threads: int = setting(64, "threads for calls; one that waits for its client needs none", ge=4)
    compute_threads: int = setting(0, "CPU threads of a tensor operation; 0: torch's default over --shards", ge=0)
    drain_seconds: float = setting(20.0, "time after SIGTERM to finish calls; 2 s for one that waits", ge=0)

    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least severe message logged")
    log_format: Literal["auto", "json", "text"] = setting("auto", "form of log lines; auto is text on a terminal")
    audit_log: Path | None = setting(
        None, "file of JSON lines of operators' and refused calls, which are in the log too; - for stdout"
    )
    tracing: bool = setting(False, "continue workers' traces, by OpenTelemetry (needs sparseps[tracing])")
    ready_fd: int | None = setting(None, "descriptor that receives a line of JSON with the bound addresses", ge=0)
    parent_pid: int | None = setting(None, "stop when this process is no longer the parent", ge=1)

    @staticmethod
    def explicit(name: str) -> str:
        """Return a setting's name as a flag."""
        return f"--{name.replace('_', '-')}"

    @property
    def source(self) -> str:
        """The server that is relayed, or stood by for; empty if there is none."""
        return self.relay_of or self.standby_of

    @property
    def coordinator_is_here(self) -> bool:
        """Whether shard 0 is reached by a socket of this host, which no other user may enter."""
        return self.coordinator.startswith("unix:")

    @property
    def shard(self) -> ShardSettings:
        """The change log and the correction of stale pushes."""
        return ShardSettings(self.ledger_multiple, self.delay_compensation)

    @model_validator(mode="after")
    def _check_together(self) -> "ServerSettings":
        for name, known in (("down_selector", SELECTORS), ("down_value_type", VALUE_CODECS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{self.explicit(name)} {getattr(self, name)!r}: use one of {', '.join(known)}")
        if self.final_model is not None and (fault := model_file_fault(self.final_model)):
            raise ValueError(f"--final-model {fault}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key are given together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs TLS: give --tls-cert and --tls-key")
        if self.certificate_roles and not self.tls_client_ca:
            raise ValueError("--certificate-roles needs callers with certificates: give their CA as --tls-client-ca")
        if self.shard_index >= self.num_shards:
            raise ValueError(f"--shard-index {self.shard_index} needs --num-shards above it, not {self.num_shards}")
        for name in ("listen", "health_listen", "metrics_listen"):
            address = getattr(self, name)
            if not address and name != "listen":
                continue
            try:
                host, port = split_address(address)
            except ValueError as error:
                raise ValueError(f"{self.explicit(name)} {error}") from None
            if name == "listen" and not is_loopback(host):
                self._check_open_address(address)
            if not 0 <= port < 65536:
                raise ValueError(f"{self.explicit(name)} {address}: no such port")
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise ValueError(f"--device {self.device!r}: use auto, cpu, cuda or cuda:N")
        if self.shards > 1:
            self._check_shards()
        if (self.source_cert is None) != (self.source_key is None):
            raise ValueError("--source-cert and --source-key are given together")
        if self.relay_of and self.standby_of:
            raise ValueError("--relay-of and --standby-of are of two kinds of server: give one of them")
        if self.source:
            self._check_source()
        if self.replicate == "ack" and (self.data_dir is None or self.durability != "journal"):
            raise ValueError("--replicate ack needs a journal, which a standby follows: give --data-dir")
        if self.standby_of and (self.data_dir is None or self.durability != "journal"):
            raise ValueError("a standby keeps the journal of its server: give it a --data-dir of its own")
        if self.promote_after_seconds and not self.standby_of:
            raise ValueError("--promote-after-seconds is of a standby: psservice standby --of HOST:PORT")
        return self

    def _check_source(self) -> None:
        """Require a source that is another server, and nothing that only a server that trains has."""
        try:
            sources = expand(self.source)
        except AddressError as error:
            name = "PSSERVICE_RELAY_OF" if self.relay_of else "PSSERVICE_STANDBY_OF"
            raise ValueError(f"--of ({name}): {error}") from None
        host, port = split_address(self.listen)
        hosts = {host, *_LOOPBACK} if host in ("0.0.0.0", "::") or is_loopback(host) else {host}
        if own := next((each for each in sources if port and each in {f"{name}:{port}" for name in hosts}), None):
            raise ValueError(
                f"--of {own} is this {'relay' if self.relay_of else 'standby'} itself, which listens there (--listen): "
                "name the other server, or listen on another port"
            )
        if other := next((name for name in _NOT_OF_RELAYS if self.relay_of and getattr(self, name)), None):
            raise ValueError(f"{self.explicit(other)} is for a server that trains; a relay has what its source has")

    def _check_shards(self) -> None:
        """Require that nothing else numbers the shards, and ports that do not overlap."""
        own = ("shard_index", "num_shards", "coordinator")
        if twice := [self.explicit(name) for name in own if name in self.model_fields_set]:
            raise ValueError(
                f"--shards {self.shards} starts and numbers every shard itself: leave out {' and '.join(twice)}"
            )
        taken: dict[int, str] = {}
        for name, count in (("listen", self.shards), ("metrics_listen", self.shards), ("health_listen", 1)):
            address = getattr(self, name)
            first = split_address(address)[1] if address else 0
            for port in range(first, first + count) if first else ():
                if port > 65535:
                    raise ValueError(f"{self.explicit(name)} {address}: {self.shards} shards need ports up to {port}")
                if port in taken:
                    raise ValueError(
                        f"{self.explicit(name)} {address}: port {port} is one of the {self.shards} of "
                        f"{self.explicit(taken[port])} {getattr(self, taken[port])}; choose ports that do not overlap"
                    )
                taken[port] = name

    def of_shard(self, index: int) -> "ServerSettings":
        """Return the settings of one of ``shards``: its place, its ports, and the health port at shard 0 only."""
        named = {name: getattr(self, name) for name in ("listen", "metrics_listen")}
        own = {name: at_port(each, split_address(each)[1] + index) for name, each in named.items() if each}
        health_listen = "" if index else self.health_listen
        place = {"shard_index": index, "num_shards": self.shards}
        return self.model_copy(update=own | place | {"health_listen": health_listen})

    def _check_open_address(self, address: str) -> None:
        """Require security of an address beyond loopback."""
        if self.tokens and not self.tls_cert:
            raise ValueError(
                f"--tokens would travel to {address} in plaintext; give --tls-cert and --tls-key, or bind 127.0.0.1"
            )
        if not self.insecure and not self.tokens and not self.tls_client_ca:
            raise ValueError(
                f"--listen {address} would let anybody in from beyond this machine; ask for tokens (--tokens, with "
                "TLS) or certificates (--tls-client-ca), bind 127.0.0.1, or pass --insecure on a network that you trust"
            )


def split_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` (``[::1]:50051`` for IPv6); raises ``ValueError`` if it is not of that form."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ValueError(f"{address!r} is not HOST:PORT, as 127.0.0.1:50051 is")
    return host.strip("[]"), int(port)


def at_port(address: str, port: int) -> str:
    """Return ``HOST:PORT`` with another port."""
    return f"{address.rpartition(':')[0]}:{port}"


def load(arguments: Sequence[str], command: str = "serve") -> ServerSettings:
    """Read the settings from command-line flags and everything below them.

    Raises :class:`SettingsError`, and ``SystemExit`` for ``--help`` or a flag that does not exist.
    """
    return ServerSettings(**_flags(command, list(arguments))())


def flag_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of the flags of ``serve``, ``relay`` or ``standby``."""
    parser: argparse.ArgumentParser = _flags(command, False).root_parser
    return parser


def _flags(command: str, arguments: list[str] | Literal[False]) -> CliSettingsSource[Any]:
    return CliSettingsSource[Any](
        ServerSettings,
        cli_prog_name=f"psservice {command}",
        cli_parse_args=arguments,
        cli_hide_none_type=True,
        add_argument_method=partial(_add_argument, command, {}),
        parse_args_method=_parse,
    )


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse flags; an unknown one ends the program with the nearest known one, and not with all of them."""
    parser.usage = "%(prog)s [--SETTING VALUE ...]"
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].partition("=")[0]
        if flag in _SOURCES.values():
            parser.exit(2, f"{parser.prog}: {flag} is --of here\n")
        name = flag.removeprefix("--").replace("-", "_")
        told = unknown_setting(name, ServerSettings.model_fields, ServerSettings.explicit) if flag[:2] == "--" else ""
        parser.exit(2, f"{parser.prog}: {told or f'{flag!r} is no flag; --help shows those there are'}\n")
    return parsed


def group_of(setting_name: str) -> str:
    """Return the title of the group in which ``--help`` has a setting."""
    title = ""
    for name in ServerSettings.model_fields:
        title = _GROUPS.get(name, title)
        if name == setting_name:
            break
    return title


def _add_argument(
    command: str,
    groups: dict[str, argparse._ArgumentGroup],
    parser: argparse.ArgumentParser,
    *flags: str,
    **options: Any,
) -> argparse.Action:
    """Add a flag to its group, with a placeholder of its value instead of the name of a Python type in ``--help``."""
    name = flags[0].removeprefix("--").replace("-", "_")
    if name not in ServerSettings.model_fields:  # --help
        return parser.add_argument(*flags, **options)
    title = group_of(name)
    if flags[0] == _SOURCES.get(command):
        flags = ("--of",)
    kind = options.get("metavar")
    if kind in _KINDS:
        options["metavar"] = next((unit for end, unit in _UNITS.items() if flags[0].endswith(end)), _KINDS[kind])
    for nothing in (" (default: null)", " (default: )"):
        options["help"] = options["help"].removesuffix(nothing)
    if title not in groups:
        groups[title] = parser.add_argument_group(title)
    return groups[title].add_argument(*flags, **options)


def shown(settings: ServerSettings) -> dict[str, Any]:
    """Return the settings that differ from their defaults as plain values, for the log."""
    return settings.model_dump(mode="json", exclude_defaults=True)

"""The server's settings: one frozen class, filled from flags, then ``PSSERVICE_*``, then a YAML file, then defaults."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import CliSettingsSource, SettingsConfigDict

from pscore.config import LayeredSettings
from pscore.names import LONGEST_NAME
from pscore.net.channels import is_loopback
from pscore.select import DEFAULT_DENSE_BELOW, DEFAULT_SELECTOR, SELECTORS
from pscore.wire.codecs.names import VALUE_CODECS
from pscore.wire.frames import DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from psservice.model.parameters import ShardSettings
from psservice.policy.staleness import StalenessScaling

ENVIRONMENT_PREFIX = "PSSERVICE_"


_UNITS = {"listen": "HOST:PORT", "-seconds": "SECONDS", "-bytes": "BYTES", "--device": "DEVICE"}
"""What a flag takes, by the end of its name."""

_KINDS = {"str": "NAME", "int": "N", "float": "NUMBER", "Path": "FILE"}
"""What any other flag takes, by the type of its setting."""


class SettingsError(ValueError):
    """A setting is unknown or out of range; the message names it."""


class ServerSettings(LayeredSettings):
    """Run a server. Each setting is also PSSERVICE_NAME in the environment and a key of the YAML file."""

    failure = SettingsError

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True
    )

    listen: str = Field(
        "127.0.0.1:50051", description="HOST:PORT for workers; port 0 picks a free one from 20000 to 29999"
    )
    health_listen: str = Field(
        "127.0.0.1:0",
        description="HOST:PORT of the plaintext gRPC health service; port 0 likewise, as logged; empty for none",
    )
    metrics_listen: str = Field(
        "127.0.0.1:0",
        description="HOST:PORT of the Prometheus metrics and the status page; port 0 likewise; empty for none",
    )
    tls_cert: Path | None = Field(None, description="the server's certificate chain (PEM); turns on TLS for workers")
    tls_key: Path | None = Field(None, description="its key (PEM)")
    tls_client_ca: Path | None = Field(
        None, description="CA (PEM) of the clients' certificates; turns callers without one away (mutual TLS)"
    )
    tokens: Path | None = Field(
        None, description="file of bearer tokens, ROLE TOKEN [WORKER] a line; turns callers without one away"
    )
    insecure: bool = Field(False, description="allow unauthenticated callers from beyond loopback, also in plaintext")
    reflection: Literal["auto", "on", "off"] = Field(
        "auto", description="gRPC reflection; auto is on for a loopback address only"
    )

    device: str = Field("auto", description="where the parameters live: auto, cpu, cuda or cuda:N")
    shard_index: int = Field(0, ge=0, description="which shard this is; 0 coordinates")
    num_shards: int = Field(1, ge=1, description="how many shards the model is cut into")
    init: Path | None = Field(
        None,
        description="what to start from instead of the first worker's upload: a safetensors file, or the data "
        "directory of a run with any number of shards",
    )
    init_checkpoint: str = Field("", description="which checkpoint of that directory; empty for its last version")

    run_id: str = Field("", max_length=LONGEST_NAME, description="name of the run; empty draws a random one")
    down_mode: Literal["auto", "exact", "topk"] = Field(
        "auto", description="how pulls are answered; auto is exact while what changed is sparse, top-k beyond that"
    )
    down_selector: str = Field(
        DEFAULT_SELECTOR, description="how the entries of a top-k reply are selected: " + ", ".join(SELECTORS)
    )
    down_value_type: str = Field(
        "fp32", description="how the values of a top-k reply travel: " + ", ".join(VALUE_CODECS)
    )
    down_density: float = Field(0.01, gt=0, le=1, description="density of a top-k reply")
    down_dense_below: int = Field(
        DEFAULT_DENSE_BELOW, ge=0, description="tensors with fewer elements are sent whole in a top-k reply"
    )
    exact_limit: float = Field(0.10, gt=0, le=1, description="density of change above which auto leaves exact replies")
    buffers: Literal["sync", "local", "none"] = Field(
        "sync", description="BatchNorm statistics: averaged and adopted, averaged but kept local, or never sent"
    )
    buffer_period_steps: int = Field(20, ge=1, description="steps of a worker between two exchanges of buffers")
    end_versions: int = Field(0, ge=0, description="end the run at this version of shard 0; 0 for no such end")
    end_samples: int = Field(0, ge=0, description="end the run after this many samples; 0 for no such end")
    final_model: Path | None = Field(None, description="safetensors file to write when the run ends")

    data_dir: Path | None = Field(
        None, description="directory that survives the server: a shard keeps its snapshots and its journal there"
    )
    durability: Literal["journal", "snapshot", "none"] = Field(
        "journal",
        description="what the data directory keeps: every push before it is acknowledged, snapshots alone, nothing",
    )
    fsync: Literal["always", "interval", "never"] = Field(
        "interval",
        description="when the journal is forced to the disk: before each answer, every so often, or when the system "
        "likes; the death of the process loses nothing in any of them, a power cut nothing with always",
    )
    fsync_interval_seconds: float = Field(1.0, gt=0, description="between two of these, with --fsync interval")
    snapshot_seconds: float = Field(300.0, gt=0, description="between two snapshots")
    journal_bytes: int = Field(
        1 << 30, ge=1 << 20, description="journal behind the newest snapshot from which another is taken at once"
    )
    keep_snapshots: int = Field(3, ge=1, description="snapshots kept, and with them the journal behind the oldest")
    recover: Literal["strict", "last-good"] = Field(
        "strict",
        description="where something that was acknowledged is damaged or gone: refuse to start, or go back to the "
        "version before it and begin a new history",
    )

    max_staleness: int = Field(
        0, ge=0, description="refuse a push staler than this; its payload goes back into the residual; 0 for no cut-off"
    )
    ssp_bound: int = Field(
        0,
        ge=0,
        description="pushes that a worker may be ahead of the slowest live one; 0 for no bound",
    )
    staleness_step: Literal["fixed", "adaptive"] = Field(
        "fixed", description="whether a push that is staler than workers make it is scaled down: (W - 1) / staleness"
    )
    rescale_speed: bool = Field(
        False, description="scale each push by its worker's time between pushes over the mean: fast ones count less"
    )
    delay_compensation: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="lambda of DC-ASGD, 0.04 in the paper: corrects stale pushes to first order; 0 for none",
    )
    max_update_norm: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="refuse a push whose L2 norm on this shard is above it; 0 for no cap",
    )

    lease_seconds: float = Field(15.0, ge=0.5, description="life of a worker's lease without renewal")
    chunk_bytes: int = Field(
        DEFAULT_CHUNK_BYTES, ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES, description="largest payload of a message"
    )
    ledger_multiple: float = Field(
        1.0, gt=0, description="changed entries remembered for exact replies, as a multiple of the shard's elements"
    )
    apply_queue_limit: int = Field(256, ge=1, description="commits that may wait for the writer before BUSY")
    image_bytes: int = Field(
        4 << 30, ge=0, description="what images of workers for top-k replies may occupy; beyond it replies are exact"
    )
    stream_bytes: int = Field(
        0, ge=0, description="what one push or upload may occupy here; 0 for more than any valid one of the shard does"
    )
    worker_bytes: int = Field(
        0, ge=0, description="what all calls of a worker may occupy before BUSY; 0 for twice what one stream may"
    )
    inflight_bytes: int = Field(
        1 << 30, ge=1, description="what all calls may occupy before BUSY; the oldest always gets through"
    )
    stream_idle_seconds: float = Field(
        60.0, gt=0, description="cancel a call whose client sends nothing that is due, or does not read, for so long"
    )
    stream_seconds: float = Field(3600.0, gt=0, description="cancel a call that waits for its client after this time")
    rpc_threads: int = Field(
        64,
        ge=4,
        description="threads that work on pushes, pulls and models; a call that waits for its client holds none",
    )
    compute_threads: int = Field(0, ge=0, description="CPU threads of a tensor operation; 0 leaves torch's default")
    drain_seconds: float = Field(
        20.0,
        ge=0,
        description="time after SIGTERM for calls that the server is at; one that waits for its client has 2 seconds",
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe message logged")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="form of a log line; auto is text on a terminal, JSON elsewhere"
    )
    tracing: bool = Field(
        False, description="go on with the traces of workers, by OpenTelemetry (needs the extra sparseps[tracing])"
    )
    ready_fd: int | None = Field(
        None, ge=0, description="file descriptor to which one line of JSON with the bound addresses is written"
    )
    parent_pid: int | None = Field(None, ge=1, description="stop when this process is no longer the parent")

    @staticmethod
    def explicit(name: str) -> str:
        """Write a setting's name as a flag."""
        return f"--{name.replace('_', '-')}"

    @property
    def shard(self) -> ShardSettings:
        """What a shard keeps beside its parameters."""
        return ShardSettings(self.ledger_multiple, self.delay_compensation)

    @property
    def scaling(self) -> StalenessScaling:
        """How pushes are scaled."""
        return StalenessScaling(self.staleness_step == "adaptive", self.rescale_speed)

    @model_validator(mode="after")
    def _check_together(self) -> "ServerSettings":
        for name, known in (("down_selector", SELECTORS), ("down_value_type", VALUE_CODECS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{self.explicit(name)} {getattr(self, name)!r}: use one of {', '.join(known)}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key are given together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs TLS: give --tls-cert and --tls-key")
        if self.shard_index >= self.num_shards:
            raise ValueError(f"--shard-index {self.shard_index} needs --num-shards above it, not {self.num_shards}")
        for name in ("listen", "health_listen", "metrics_listen"):
            address = getattr(self, name)
            if not address and name != "listen":
                continue
            host, port = split_address(address)
            if name == "listen" and not is_loopback(host):
                self._check_open_address(address)
            if not 0 <= port < 65536:
                raise ValueError(f"{self.explicit(name)} {address}: no such port")
        if self.device not in ("auto", "cpu", "cuda") and not (
            self.device.startswith("cuda:") and self.device[5:].isdigit()
        ):
            raise ValueError(f"--device {self.device!r}: use auto, cpu, cuda or cuda:N")
        return self

    def _check_open_address(self, address: str) -> None:
        """Check that an address beyond loopback is guarded."""
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
    """Split ``HOST:PORT`` (``[::1]:50051`` for IPv6); raises ``ValueError`` where it is not of that form."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def load(arguments: Sequence[str]) -> ServerSettings:
    """Read the settings from command-line flags and everything below them.

    Raises:
        SettingsError: a setting is unknown or out of range, or the YAML file cannot be read.
        SystemExit: ``--help``, or a flag that does not exist.
    """
    flags = CliSettingsSource[Any](
        ServerSettings,
        cli_prog_name="psservice serve",
        cli_parse_args=list(arguments),
        cli_hide_none_type=True,
        add_argument_method=_add_argument,
    )()
    return ServerSettings(**flags)


def _add_argument(parser: argparse.ArgumentParser, *flags: str, **options: Any) -> argparse.Action:
    """Add a flag that ``--help`` shows with what it takes, not with the name of a Python type."""
    kind = options.get("metavar")
    if kind in _KINDS:
        options["metavar"] = next((unit for end, unit in _UNITS.items() if flags[0].endswith(end)), _KINDS[kind])
    for nothing in (" (default: null)", " (default: )"):
        options["help"] = options["help"].removesuffix(nothing)
    return parser.add_argument(*flags, **options)


def shown(settings: ServerSettings) -> dict[str, Any]:
    """Return the settings that are not at their defaults as plain values, as they are printed at start."""
    return settings.model_dump(mode="json", exclude_defaults=True)

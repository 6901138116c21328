"""The worker's settings: ``PSCLIENT_*`` in the environment, then a YAML file, then defaults."""

import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from pydantic import SecretStr, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from psclient.errors import ConfigurationError
from pscore.config import LayeredSettings, setting
from pscore.net.addresses import AddressError, expand
from pscore.net.channels import Security
from pscore.selection import DEFAULT_DENSE_BELOW, DEFAULT_SELECTOR, SELECTORS
from pscore.units import LONGEST_SECONDS
from pscore.wire.codecs.names import INDEX_CODECS, VALUE_CODECS

OnLoad = Literal["error", "server", "replace"]


class RunningServer(Protocol):
    """A :class:`~psclient.LocalServer`."""

    @property
    def server(self) -> str:
        """Its addresses, separated by commas."""


Server = str | Sequence[str] | RunningServer
"""What names the servers: addresses in one string or in several, or servers of one's own."""

LOCAL = "local"

_JOB_PREFIXES = {"JOB_COMPLETION_INDEX": "job", "SLURM_PROCID": "slurm", "RANK": "rank"}
_JOB_NUMBERS = (*_JOB_PREFIXES, "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class ClientSettings(LayeredSettings):
    """How a worker finds its server, how long it waits, and how it cuts and writes a push.

    Raises:
        ConfigurationError: a setting is unknown or out of range, or the YAML file cannot be read.
    """

    failure = ConfigurationError

    model_config = SettingsConfigDict(env_prefix="PSCLIENT_", frozen=True, extra="forbid")

    server: str = setting(
        "",
        "HOST:PORT of each shard in order, separated by commas, or as a range: ps-{0..3}.ps:50051; of any one shard of "
        "psservice serve --shards; or dns:///HOST:PORT, one name for all shards; local starts one for this process",
    )
    worker: str = setting("", "this worker's name; empty takes it from the job's environment")
    run_id: str = setting("", "refuse to train in any other run; empty accepts the server's")
    tls_ca: Path | None = setting(None, "CA certificates (PEM) that the server's must descend from; turns on TLS")
    tls_cert: Path | None = setting(None, "this worker's certificate (PEM), for mutual TLS")
    tls_key: Path | None = setting(None, "its key (PEM)")
    tls_server_name: str = setting("", "name in the server's certificate, if the address has another")
    token: SecretStr = setting(SecretStr(""), "bearer token; better a file, or the environment")
    token_file: Path | None = setting(None, "file that holds the bearer token; read again when it changes")
    deadline_seconds: float = setting(
        30.0,
        "longest time for one call; of a push, a pull or a model, without a byte that moves",
        gt=0,
        le=LONGEST_SECONDS,
    )
    connect_seconds: float = setting(60.0, "how long the first contact is tried", gt=0)
    patience_seconds: float = setting(
        300.0, "how long a lost server is tried again during training; the last call may take its deadline more", gt=0
    )
    value_type: str = setting("fp32", "how pushed values travel: " + ", ".join(VALUE_CODECS))
    index_codec: str = setting(
        "auto",
        "how indices travel, both ways; auto weighs bytes against time by the measured link, so that it spends bytes "
        "on a fast one: auto, " + ", ".join(INDEX_CODECS),
    )
    selector: str = setting(DEFAULT_SELECTOR, "how the entries of a push are selected: " + ", ".join(SELECTORS))
    dense_below: int = setting(
        DEFAULT_DENSE_BELOW,
        "tensors smaller than this are sent dense; if they add up to more than 65,536 elements and a twentieth of the "
        "model, the limit is lowered automatically; 0: none",
        ge=0,
    )
    residual_type: Literal["fp32", "bf16"] = setting(
        "fp32",
        "how residuals and momenta are kept on the host; bf16 takes half the memory, and rounds up or down by chance",
    )
    merge: Literal["buckets", "mgs"] = setting(
        "buckets", "which neighbouring tensors travel together: groups by bytes, or those of the MGS-SGD paper"
    )
    bucket_bytes: int = setting(25 << 20, "bytes of gradients of a group; 1: every tensor by itself", ge=1)
    upload_frozen: bool = setting(
        False,
        "keep frozen parameters on the server, too, so that they may be thawed later; else it compares their SHA-256 "
        "only; all workers must agree",
    )
    on_load: OnLoad = setting(
        "error",
        "what becomes of a model that a script loads into a worker of a run that has been trained: error raises "
        "ModelLoadedError, server drops it, replace puts it in the place of the run's",
    )
    metrics_listen: str = setting(
        "",
        "HOST:PORT at which this worker has Prometheus metrics of its own, port 0 for any; empty: nothing listens "
        "(needs prometheus-client, as in the extra sparseps[server])",
    )
    tracing: bool = setting(False, "trace each step, by OpenTelemetry (needs the extra sparseps[tracing])")
    flush_on_sigterm: bool = setting(True, "on SIGTERM, push what is still held, leave, then exit")

    @property
    def names_a_value_type(self) -> bool:
        """Whether ``value_type`` was set, be it to its default."""
        return "value_type" in self.model_fields_set

    @property
    def security(self) -> Security:
        """How channels are protected."""
        token = self.token.get_secret_value()
        return Security(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name, token, self.token_file)

    @field_validator("value_type", "index_codec", "selector")
    @classmethod
    def _check_name(cls, name: str, field: ValidationInfo) -> str:
        known = {"value_type": VALUE_CODECS, "index_codec": ("auto", *INDEX_CODECS), "selector": SELECTORS}
        choices = known[str(field.field_name)]
        if name not in choices:
            raise ValueError(f"{name!r} is not known; use one of {', '.join(choices)}")
        return name


def load(**overrides: object) -> ClientSettings:
    """Read the settings; ``overrides`` that are not ``None`` win over everything."""
    return ClientSettings(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]


def resolve(
    settings: ClientSettings | None, server: Server | None, worker: str | None, on_load: str | None = None
) -> ClientSettings:
    """Return the settings that hold for an optimizer: those given, else loaded; the other arguments win."""
    named: Any = getattr(server, "server", server)
    if isinstance(named, Sequence) and not isinstance(named, str) and all(isinstance(each, str) for each in named):
        named = ",".join(named)
    if not isinstance(named, str | None):
        raise ConfigurationError(f'server= must be "HOST:PORT", a list of these, or a LocalServer, not {server!r}')
    if not isinstance(worker, str | None):
        raise ConfigurationError(f"worker= must be a name, not {worker!r}")
    if on_load is not None and on_load not in get_args(OnLoad):
        raise ConfigurationError(f"on_load= must be one of {', '.join(get_args(OnLoad))}, not {on_load!r}")
    given = {"server": named, "worker": worker, "on_load": on_load}
    if settings is None:
        return load(**given)
    if not isinstance(settings, ClientSettings):
        raise ConfigurationError(f"settings= must be psclient.ClientSettings(...), not {settings!r}")
    return settings.model_copy(update={name: value for name, value in given.items() if value is not None})


def require_server(settings: ClientSettings) -> None:
    """Raise :class:`ConfigurationError` if no server is named: a worker without one would train alone."""
    if not settings.server:
        raise ConfigurationError(
            'no server is named: pass server="HOST:PORT" or set PSCLIENT_SERVER, the same on all workers; `psservice '
            'serve` starts one. To try it in this process alone, pass server="local"'
        )


def addresses(server: str) -> tuple[str, ...]:
    """Return each shard's address, or one name for all (:func:`pscore.net.addresses.expand`)."""
    try:
        return expand(server)
    except AddressError as error:
        raise ConfigurationError(str(error)) from error


class PlaceInJob(NamedTuple):
    """What a job calls a process, and its number there, from 0."""

    name: str
    number: int


def worker_name(settings: ClientSettings, environment: Mapping[str, str] = os.environ) -> str:
    """Return this worker's name: the setting, or its place in the job, or a random one."""
    place = place_in_job(environment)
    return settings.worker or (place.name if place else f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}")


def place_in_job(environment: Mapping[str, str]) -> PlaceInJob | None:
    """Return this process's place in a job of Kubernetes, Slurm, torchrun or Ray Train; ``None`` outside of one.

    If ``LOCAL_WORLD_SIZE`` says that a launcher has started several processes on a node, they share the index that
    Kubernetes or Slurm has given the node, and their ranks tell them apart. The ranks are those of all nodes, unless
    each node has a ``torchrun`` of its own.
    """
    numbers = {name: int(value) for name, value in environment.items() if name in _JOB_NUMBERS and value.isdecimal()}
    rank, on_node = numbers.get("RANK"), numbers.get("LOCAL_WORLD_SIZE")
    found = next((name for name in _JOB_PREFIXES if name in numbers), None)
    if found is None:
        return None
    name, index = f"{_JOB_PREFIXES[found]}-{numbers[found]}", numbers[found]
    if rank is None or on_node is None or found == "RANK":
        return PlaceInJob(name, index)
    if on_node == numbers.get("WORLD_SIZE") and environment.get("TORCHELASTIC_RUN_ID"):
        return PlaceInJob(f"{name}-rank-{rank}", index * on_node + rank)
    return PlaceInJob(f"rank-{rank}", rank)


def worker_index(worker: str | None = None) -> int:
    """Return this worker's number, for seeds and for its part of the data: the same after a restart.

    It is the number at the end of its name (``trainer-3`` has 3), else its place in the job of Kubernetes, Slurm,
    torchrun or Ray Train. A process without either is 0 if ``PSCLIENT_SERVER`` names no server.

    Args:
        worker: its name, if the optimizer is given one as ``worker=``; the default is ``PSCLIENT_WORKER``.

    Raises:
        ConfigurationError: there is a server, and nothing tells its workers apart; or a setting cannot be used.
    """
    settings = resolve(None, None, worker)
    if number := re.search(r"[0-9]{1,9}$", settings.worker):
        return int(number[0])
    if place := place_in_job(os.environ):
        return place.number
    if settings.server in ("", LOCAL):
        return 0
    found = f"the name {settings.worker!r} does not end in a number" if settings.worker else "there is no name"
    raise ConfigurationError(
        f"this process cannot tell which of the workers it is: {found}. Start the first with "
        "PSCLIENT_WORKER=trainer-0, the next with PSCLIENT_WORKER=trainer-1 and so on, or write "
        'worker_index("trainer-0"); torchrun, Slurm and Kubernetes number their workers themselves'
    )


def sibling_workers(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable that says that this process is one of several workers; ``None`` if none does."""
    for variable in ("WORLD_SIZE", "SLURM_NTASKS"):
        if environment.get(variable, "").isdigit() and int(environment[variable]) > 1:
            return variable
    return "JOB_COMPLETION_INDEX" if environment.get("JOB_COMPLETION_INDEX") else None

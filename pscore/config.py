"""Settings from several sources: explicit values, then the environment, then a YAML file, then defaults.

Server and worker share this rule. Each source refuses unknown names; messages name a value as its source does.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, YamlConfigSettingsSource
from yaml import YAMLError

from pscore.names import is_url
from pscore.units import parse_bytes, parse_seconds

_SERVICE_LINK = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def setting(default: Any, description: str, **bounds: Any) -> Any:
    """Declare a setting, with its help and the bounds of its value."""
    return Field(default, description=description, **bounds)


class LayeredSettings(BaseSettings):
    """Base of a program's settings; a subclass sets ``env_prefix``, :attr:`failure` and its fields."""

    failure: ClassVar[type[Exception]]
    """Raised if a setting is unknown, its value cannot be, or the YAML file cannot be read."""

    others: ClassVar[tuple[str, ...]] = ()
    """Variables that begin like a setting and are no setting's, in small letters, without the prefix."""

    config: Path | None = setting(None, "YAML file with any of these settings")

    def __init__(self, **given: Any) -> None:
        names = type(self).model_fields
        if lines := unknown_variables(str(self.model_config["env_prefix"]), [*names, *self.others]):
            raise self.failure("\n".join(lines))
        try:
            super().__init__(**given)
        except ValidationError as error:
            lines = []
            for problem in error.errors():
                name, *inner = (str(part) for part in problem["loc"] or ("",))
                form = self._form_of(name, given)
                message = problem["msg"].removeprefix("Value error, ")
                if problem["type"] == "extra_forbidden":
                    lines.append(unknown_setting(name, names, form))
                else:
                    lines.append(f"{'.'.join([form(name), *inner])}: {message}" if name else message)
            raise self.failure("\n".join(lines)) from error

    @staticmethod
    def explicit(name: str) -> str:
        """Return a setting's name as a caller writes it explicitly."""
        return f"{name}="

    @classmethod
    def _form_of(cls, name: str, given: dict[str, Any]) -> Callable[[str], str]:
        """Return how the source of a setting writes names."""
        prefix = str(cls.model_config["env_prefix"])
        if name in given:
            return cls.explicit
        if prefix + name.upper() in map(str.upper, os.environ):
            return lambda each: prefix + each.upper()
        config = given.get("config") or os.environ.get(f"{prefix}CONFIG")
        return lambda each: f"{each} in {config}" if each == name else each

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_urls(cls, value: Any, info: Any) -> Any:
        annotation = cls.model_fields[info.field_name].annotation
        if annotation in (Path, Path | None) and value is not None and is_url(value):
            raise ValueError(f"{str(value)!r} is a URL; name a path on this machine (a remote disk may be mounted)")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _read_units(cls, value: Any, info: Any) -> Any:
        """Read the text of a duration or a size, as a flag, a variable or a YAML file has it, with its unit."""
        if isinstance(value, str):
            if info.field_name.endswith("_seconds"):
                return parse_seconds(value)
            if info.field_name.endswith("_bytes"):
                return parse_bytes(value)
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources; explicit values or the environment name the YAML file."""
        config = init_settings().get("config") or env_settings().get("config")
        if not config:
            return init_settings, env_settings
        if not Path(config).is_file():
            raise cls.failure(f"config: no such file: {config}")
        try:
            return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=config)
        except (OSError, YAMLError, TypeError, ValueError) as error:
            raise cls.failure(f"{config} is not a YAML mapping of settings: {error}") from error


def unknown_variables(prefix: str, names: Iterable[str]) -> list[str]:
    """Return a line for each variable of the environment that begins like a setting and is none.

    ``prefix`` is in capitals, ``names`` in small letters. Variables that Kubernetes sets for a Service whose name
    begins like the prefix (``PSSERVICE_SERVICE_HOST``, ``PSSERVICE_PORT=tcp://…``) are ignored.
    """
    known = [*names]
    lines = []
    for variable, value in sorted(os.environ.items()):
        name = variable.upper().removeprefix(prefix)
        is_link = _SERVICE_LINK.fullmatch(name) or (name.endswith("PORT") and _SERVICE_URL.match(value))
        if variable.upper().startswith(prefix) and name.lower() not in known and not is_link:
            lines.append(unknown_setting(name.lower(), known, lambda each: prefix + each.upper()))
    return lines


def unknown_setting(name: str, known: Iterable[str], form: Callable[[str], str]) -> str:
    """Return a line that names an unknown setting and the nearest known one, both in the form of their source."""
    nearest = difflib.get_close_matches(name, [*known], n=1)
    hint = f"did you mean {form(nearest[0])}?" if nearest else "docs/reference/settings.md lists those there are"
    return f"{form(name)}: there is no such setting; {hint}"

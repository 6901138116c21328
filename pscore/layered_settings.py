"""Settings from several sources: explicit values, then the environment, then a YAML file, then defaults.

Server and worker read their settings by the same rule; this is the rule.
"""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, YamlConfigSettingsSource
from yaml import YAMLError


class LayeredSettings(BaseSettings):
    """Base of a program's settings; a subclass sets ``env_prefix`` and its fields."""

    config: Path | None = Field(None, description="YAML file with any of these settings")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources; explicit values or the environment name the YAML file.

        Raises:
            OSError: there is no such file, or it is not a mapping.
        """
        config = init_settings().get("config") or env_settings().get("config")
        if not config:
            return init_settings, env_settings
        if not Path(config).is_file():
            raise FileNotFoundError(f"no such file: {config}")
        try:
            return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=config)
        except (YAMLError, TypeError, ValueError) as error:
            raise OSError(f"{config} is not a YAML mapping of settings: {error}") from error

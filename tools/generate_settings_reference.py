"""Writes docs/reference/settings.md from the settings classes; ``--check`` only compares.

Run it after changing a setting: ``make references``.
"""

import sys
from pathlib import Path

from pydantic_settings import BaseSettings

from psclient.settings import ClientSettings
from psservice.settings import ServerSettings
from tools.generated import keep

TARGET = Path(__file__).parent.parent / "docs" / "reference" / "settings.md"

HEAD = """# Settings

Generated from `psservice/settings.py` and `psclient/settings.py` by `tools/generate_settings_reference.py`.

An unknown variable `PSSERVICE_*` or `PSCLIENT_*`, or an unknown key of a file, is refused with the nearest name.
Kubernetes' variables for a Service called `psservice` or `psclient` (`PSSERVICE_SERVICE_HOST`,
`PSSERVICE_PORT=tcp://…`) are ignored.

A setting that ends in `_seconds` takes a number of seconds, or a duration with units: `500ms`, `15s`, `5m`, `2h`, `1d`,
`1h30m`. One that ends in `_bytes` takes a number of bytes, or a size: `64Ki`, `512Mi`, `1Gi` (of 1024), `64k`, `500M`,
`1G` (of 1000). So do the commands' flags. In Python a setting is a number, or such a text.

"""

SERVER = """## The server: `psservice serve`

Each setting is a flag (`--lease-seconds 20`), an environment variable (`PSSERVICE_LEASE_SECONDS=20`) and a key of the
YAML file that `--config` names (`lease_seconds: 20`); flags win over the environment, which wins over the file.
`psclient.LocalServer(lease_seconds=20)` takes the same names.

"""

CLIENT = """## The worker: `psclient.ClientSettings`

Each setting is an environment variable (`PSCLIENT_PATIENCE_SECONDS=600`), a key of the YAML file that `PSCLIENT_CONFIG`
names, and an argument of `psclient.ClientSettings(...)`, which an optimizer takes as `settings=`. Arguments win over
the environment, which wins over the file. The optimizer's own `server=` and `worker=` win over all.

"""


def table(settings: type[BaseSettings]) -> str:
    rows = ["| name | default | meaning |", "|---|---|---|"]
    for name, field in settings.model_fields.items():
        default = "–" if field.default is None or field.default == "" else f"`{field.default}`"
        choices = getattr(field.annotation, "__args__", ())
        meaning = str(field.description)
        if all(isinstance(choice, str) for choice in choices) and choices:
            meaning += f" ({', '.join(f'`{choice}`' for choice in choices)})"
        rows.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


def reference() -> str:
    return HEAD + SERVER + table(ServerSettings) + "\n" + CLIENT + table(ClientSettings)


def main() -> int:
    """Write or compare; return 1 where the page is out of date."""
    return keep(TARGET, reference())


if __name__ == "__main__":
    sys.exit(main())

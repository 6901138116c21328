"""Variables of the environment that look like settings and are none."""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping

_SERVICE_LINK = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def unknown_variables(prefix: str, names: Iterable[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each variable of the environment that begins like a setting and is none.

    What Kubernetes sets for a Service whose name begins like the prefix (``PSSERVICE_SERVICE_HOST``,
    ``PSSERVICE_PORT=tcp://…``) is left alone.

    Args:
        prefix: of the variables, in capitals.
        names: of the settings, in small letters.
        environment: where to look.
    """
    known = [*names]
    lines = []
    for variable, value in sorted(environment.items()):
        name = variable.upper().removeprefix(prefix)
        if not variable.upper().startswith(prefix) or name.lower() in known or _is_service_link(name, value):
            continue
        lines.append(unknown(name.lower(), known, lambda each: prefix + each.upper()))
    return lines


def unknown(name: str, known: Iterable[str], form: Callable[[str], str]) -> str:
    """Return a line that names an unknown setting and the nearest known one, both in the form in which it was given."""
    nearest = difflib.get_close_matches(name, [*known], n=1)
    hint = f"did you mean {form(nearest[0])}?" if nearest else "docs/settings.md lists those there are"
    return f"{form(name)}: there is no such setting; {hint}"


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(name) or (name.endswith("PORT") and _SERVICE_URL.match(value)))

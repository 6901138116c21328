"""Writes docs/reference/api.md from the public names of psclient and their docstrings; ``--check`` only compares.

Run it after changing a public signature or docstring: ``make references``.
"""

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import psclient
from tools.generated import keep

TARGET = Path(__file__).parent.parent / "docs" / "reference" / "api.md"

HEAD = """# The API of the worker

Generated from the docstrings of `psclient` by `tools/generate_api_reference.py`. What the settings mean:
[settings](settings.md); how it is used: [training](../guide/training.md); the server's commands:
[operate](../operate/running.md).

"""

GROUPS = {
    "Methods": [
        "DGS",
        "ASGD",
        "GradientDropping",
        "DGC",
        "MomentumSGD",
        "SSGD",
        "WAGMA",
        "Outer",
        "ServerOptimizer",
        "ServerRMSprop",
    ],
    "Beside the optimizer": [
        "Budget",
        "Rounds",
        "VersionClock",
        "ElasticSampler",
        "NodeOptimizer",
        "node_group",
        "worker_index",
    ],
    "What steps did": ["StepReport", "Totals", "scalars"],
    "Models and servers": ["download", "save", "LocalServer", "ClientSettings"],
}
MODULES = ("schedules", "errors")
BASE = "psclient.optim.base.ParameterServerOptimizer"

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
_ENTRY = re.compile(r"^ {4}(\S[^:]*(?::(?!\s)[^:]*)*): (.*)$")


def reference() -> str:
    missing = set(psclient.__all__) - {name for names in GROUPS.values() for name in names} - {*MODULES, "__version__"}
    if missing:
        raise SystemExit(f"put {', '.join(sorted(missing))} into a group of {Path(__file__).name}")
    parts = [HEAD]
    module, _, name = BASE.rpartition(".")
    parts += ["## What every method's optimizer has\n", *_class(getattr(importlib.import_module(module), name), name)]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for each in names:
            parts += _entry(f"psclient.{each}", getattr(psclient, each))
    for each in MODULES:
        parts += [f"## psclient.{each}\n", *_module(importlib.import_module(f"psclient.{each}"))]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _module(module: ModuleType) -> Iterator[str]:
    yield _prose(module.__doc__ or "")
    for name, thing in vars(module).items():
        own = not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
        if own and name not in psclient.__all__ and _is_shown(thing, module):
            yield from _entry(f"{module.__name__}.{name}", thing)


def _is_shown(thing: object, module: ModuleType) -> bool:
    """Tell whether a name is for users: of the errors, those that a caller can see."""
    if module is psclient.errors:
        return inspect.isclass(thing) and issubclass(thing, psclient.errors.SparsepsError)
    return inspect.isfunction(thing)


def _entry(path: str, thing: object) -> Iterator[str]:
    if inspect.isclass(thing):
        yield from _class(thing, path)
    elif isinstance(thing, FunctionType):
        yield f"### `{path}`\n"
        yield _signature(path.rpartition(".")[2], thing)
        yield _prose(thing.__doc__ or "")


def _class(thing: type, path: str) -> Iterator[str]:
    yield f"### `{path}`\n"
    if issubclass(thing, Exception):
        yield "A " + " and a ".join(f"`{base.__name__}`" for base in thing.__bases__) + ".\n"
    elif path == "psclient.ClientSettings":
        yield "Every field: [settings](settings.md#the-worker-psclientclientsettings).\n"
    elif isinstance(vars(thing).get("__init__"), FunctionType):
        yield _signature(thing.__name__, vars(thing)["__init__"])
    yield _prose(thing.__doc__ or "")
    for name, member in vars(thing).items():
        if name.startswith("_") or path == "psclient.ClientSettings":
            continue
        yield from _member(name, member)


def _member(name: str, member: object) -> Iterator[str]:
    if isinstance(member, property):
        yield f"**`{name}`** – {_first_line(member.__doc__)}\n"
        return
    call = member.__func__ if isinstance(member, staticmethod | classmethod) else member
    if isinstance(call, FunctionType) and call.__doc__ and not call.__doc__.startswith("See "):
        yield f"**`{name}{_parameters(call)}`**\n"
        yield _prose(call.__doc__)


def _signature(name: str, call: FunctionType) -> str:
    text = f"{name}{_parameters(call)}"
    if len(text) > 100:
        inner = ",\n".join(f"    {part}" for part in _split(text[len(name) + 1 : text.rindex(")")]))
        text = f"{name}(\n{inner},\n{text[text.rindex(')') :]}"
    return f"```python\n{text}\n```\n"


def _parameters(call: FunctionType) -> str:
    """Return a signature as it stands in the source: without ``self``, annotations unevaluated."""
    signature = inspect.signature(call)
    own = [p for name, p in signature.parameters.items() if name not in ("self", "cls")]
    text = str(signature.replace(parameters=own))
    return re.sub(r"(?:\b[a-z_]+\.)+(?=[A-Z])", "", text).replace(" -> None", "")


def _split(parameters: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, current = [], 0, ""
    for character in parameters:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def _first_line(docstring: str | None) -> str:
    return _plain(inspect.cleandoc(docstring or "").replace("\n", " "))


def _prose(docstring: str) -> str:
    """Turn a docstring into Markdown: sections into lists, the rest as it is."""
    lines: list[str] = []
    section = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if found := _SECTION.match(line):
            section = found[1]
            lines += [f"*{section}*", ""]
        elif section and (entry := _ENTRY.match(line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif section and line.startswith(" "):
            lines.append(textwrap.indent(line.strip(), "  " if lines[-1].startswith(("-", "  ")) else ""))
        else:
            section = "" if line else section
            lines.append(line)
    return _plain("\n".join(lines)) + "\n"


def _plain(text: str) -> str:
    """Replace roles and double back-quotes of docstrings by Markdown's code."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda found: f"`{found[1].removeprefix('psclient.')}`", text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE).replace("``", "`")


def main() -> int:
    """Write or compare; return 1 where the page is out of date."""
    return keep(TARGET, reference())


if __name__ == "__main__":
    sys.exit(main())

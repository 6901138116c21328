"""The arguments of the optimizers, checked before anything is sent."""

import difflib
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypedDict

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

from psclient.budget import Budget
from psclient.compress.groups import check_hyperparameters
from psclient.errors import ConfigurationError, UnknownArgumentError
from psclient.model.module import TrainedModel
from psclient.rounds import Rounds
from psclient.settings import ClientSettings, OnLoad, Server
from psclient.whole_numbers import whole_number

log = logging.getLogger("psclient")

Params = ParamsT | torch.nn.Module
"""What is trained: parameters, param groups, or a model, all of whose parameters that need a gradient are meant."""

Density = float | Callable[[int], float]
"""Share of a tensor's entries that is sent: a number, or a function of the worker's step (from 1)."""

Kind = str | type[Optimizer]
"""A class of ``torch.optim``, or its name."""

Description = Kind | tuple[Kind, Mapping[str, Any]]
"""An optimizer of ``torch.optim``: its class, or class and options."""


class CommonOptions(TypedDict, total=False):
    """Arguments of every method; :class:`~psclient.optim.base.ParameterServerOptimizer` explains them."""

    model: torch.nn.Module | None
    server: Server | None
    worker: str | None
    budget: float | Budget | None
    on_load: OnLoad | None
    settings: ClientSettings | None


class RoundsOptions(CommonOptions, total=False):
    """Arguments of a method that trains in rounds if it is asked to."""

    rounds: Rounds | None


class OverlapOptions(CommonOptions, total=False):
    """Arguments of a method that pushes gradients."""

    overlap: bool


class Options(RoundsOptions, OverlapOptions, total=False):
    """Arguments of a method that pushes gradients, in rounds if it is asked to."""


_OTHERS_NAMES = {"learning_rate": "lr"}
"""Arguments as other libraries call them."""

_UNITS = {"versions": "", "samples": " samples"}


def needs_closure(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer of torch's recomputes the loss within a step, as LBFGS does."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def unknown_argument(kind: type, base: type, name: str) -> UnknownArgumentError:
    """Return the error for an argument that neither a method nor the base of all methods has."""
    own = inspect.signature(kind).parameters.keys() - {"connection"}
    common = inspect.signature(base).parameters.values()
    known = own | {each.name for each in common if each.kind is each.KEYWORD_ONLY}
    near = difflib.get_close_matches(_OTHERS_NAMES.get(name, name), known, 1)
    if name in ClientSettings.model_fields:
        variable = f"{ClientSettings.model_config['env_prefix']}{name.upper()}"
        return UnknownArgumentError(
            f"{kind.__name__}() got an unexpected keyword argument {name!r}, which is a setting: pass "
            f"settings=psclient.ClientSettings({name}=...), or set {variable} in the environment"
        )
    takes = ", ".join(each for each in inspect.signature(kind).parameters if each != "connection")
    hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {takes}, and what every method takes"
    return UnknownArgumentError(f"{kind.__name__}() got an unexpected keyword argument {name!r}{hint}")


def split_model(params: Params, model: torch.nn.Module | None) -> tuple[Any, torch.nn.Module | None]:
    """Return parameters and the model; :class:`ConfigurationError` if a model is given twice, or trains nothing."""
    if not isinstance(params, torch.nn.Module):
        return params, model
    if model is not None and model is not params:
        raise ConfigurationError(
            "params is a model, and model= is another: pass one of them, or the parameters that are to be trained"
        )
    trained = [parameter for parameter in params.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigurationError(
            f"params is a model, {type(params).__name__}, and none of its parameters needs a gradient: thaw those that "
            "are to be trained first (requires_grad_())"
        )
    return trained, params


def check_params(params: Any) -> Any:
    """Return parameters or groups to be trained; :class:`ConfigurationError` for a model among them, or for nothing."""
    if isinstance(params, torch.Tensor):  # which is torch's to refuse
        return params
    found = list(params)
    for each in found:
        if isinstance(each.get("params") if isinstance(each, dict) else each, torch.nn.Module):
            raise ConfigurationError(
                "params holds a model: pass its parameters, model.parameters(), and the model as model="
            )
    if not found:
        raise ConfigurationError(
            "params is empty: pass model.parameters(), anew to each optimizer, as it can be read once only"
        )
    return found


def check_mode(overlap: object, rounds: object) -> None:
    """Raise :class:`ConfigurationError` if one is of another kind."""
    if rounds is not None and not isinstance(rounds, Rounds):
        raise ConfigurationError(f"rounds must be psclient.Rounds(...), not {rounds!r}")
    if not isinstance(overlap, bool):
        raise ConfigurationError(f"overlap= must be True or False, not {overlap!r}")


def check_seconds(seconds: object) -> None:
    """Raise :class:`ConfigurationError` if a time to wait is none."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ConfigurationError(f"seconds must be a number of seconds, at least 0, not {seconds!r}")


def check_step(closure: object, samples: object) -> None:
    """Raise :class:`ConfigurationError` if an argument of ``step()`` is of another kind."""
    if samples is not None:
        whole_number(samples, "samples must be a number of samples", 0, (1 << 48) - 1)
    if closure is not None and not callable(closure):
        raise ConfigurationError(f"step() takes a closure or nothing, not {closure!r}")


def check_added(
    groups: list[dict[str, Any]], model: TrainedModel | None, *, are_agreed: bool = False, step_has_begun: bool = False
) -> None:
    """Remove the last group, and raise :class:`ConfigurationError`, if a worker cannot train it.

    ``model`` is ``None`` before the worker joins its run; the server's optimizer has groups that ``are_agreed``, too.
    """
    try:
        check_hyperparameters(groups[-1])
        if model is None:
            return
        if not {id(parameter) for parameter in groups[-1]["params"]} <= {id(known) for known in model.parameters}:
            raise ConfigurationError(
                "a parameter that was not part of the model, or was frozen, cannot be added after joining a server; to "
                "thaw parameters later, set upload_frozen=True (PSCLIENT_UPLOAD_FROZEN) on all workers"
            )
        if are_agreed:
            raise ConfigurationError(
                "the server's optimizer has the param groups that it was made with, and would leave others alone; "
                "a run that trains them too is another one"
            )
        if step_has_begun:
            raise ConfigurationError("a group cannot be added between backward() and step() with overlap=True")
    except ConfigurationError:
        groups.pop()
        raise


def warn_without_model(groups: Sequence[Mapping[str, Any]]) -> None:
    """Say what an optimizer of bare parameters goes without."""
    unnamed = "tensors are called parameter_0, parameter_1 and so on, names that no model loads; "
    log.warning(
        "without model= %sbuffers stay local, and a step counts as one sample. Pass model=, on every worker",
        "" if "param_names" in groups[0] else unnamed,
    )


def as_json(value: Any, what: str) -> str:
    """Return a part of the server's optimizer as text in which workers agree."""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False, default=_number)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"the {what} of the server's optimizer must be numbers, words and lists of them: {error}"
        ) from error


def _number(value: Any) -> Any:
    """Return the number that a tensor or an array of one element has."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.item()  # ValueError, RuntimeError for more than one element
    raise TypeError(f"{value!r} is none of them")


def class_name(given: Any, kind: type, among: ModuleType, what: str) -> str:
    """Return the name of a class of torch's that is given as itself or by its name."""
    if isinstance(given, str) and given:
        return given
    name = getattr(given, "__name__", "")
    if isinstance(given, type) and issubclass(given, kind) and getattr(among, name, None) is given:
        return str(name)
    raise ConfigurationError(
        f"{what} must be a class of {among.__name__}, or its name, from which the server makes its own; not {given!r}"
    )


def optimizer_name(given: Any, what: str) -> str:
    """Return the name of an optimizer of the server, given as a class of ``torch.optim`` or by name."""
    return class_name(given, Optimizer, torch.optim, what)


def options_of(optimizer: str) -> tuple[frozenset[str], float]:
    """Return the options that a class of ``torch.optim`` has, and its default rate; none of an unknown class."""
    kind = getattr(torch.optim, optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        return frozenset(), 0.0
    if needs_closure(kind):
        raise ConfigurationError(
            f"{optimizer} recomputes the loss within a step, and a server has no loss to compute; take an optimizer "
            "that steps on gradients, as AdamW"
        )
    options = inspect.signature(kind).parameters
    return frozenset(options.keys() - {"params"}), float(options["lr"].default) if "lr" in options else 0.0


def scheduler_description(given: tuple[Any, ...] | str | type[LRScheduler]) -> dict[str, Any]:
    """Return a scheduler of the server, as ``(StepLR, {"step_size": 100})``, by parts."""
    parts = (given,) if isinstance(given, str | type) else given
    kind, options, inner = (*parts, {}, ())[:3] if isinstance(parts, tuple | list) and parts else ("", {}, ())
    if not kind or not isinstance(options, Mapping):
        raise ConfigurationError(
            f'scheduler= must be a class, or a class with options, as ("StepLR", {{"step_size": 100}}), not {given!r}'
        )
    name = class_name(kind, LRScheduler, torch.optim.lr_scheduler, "scheduler=")
    found: dict[str, Any] = {"name": name, "options": dict(options)}
    return found | ({"schedulers": [scheduler_description(each) for each in inner]} if inner else {})


def scheduler_interval(given: int | tuple[str, int]) -> str:
    """Return the distance between two steps of a scheduler of the server, as workers agree in."""
    unit, count = given if isinstance(given, tuple | list) and len(given) == 2 else ("versions", given)
    what = 'scheduler_every= must be a number of versions or ("samples", N), as ("samples", len(dataset)) for an epoch'
    if not (isinstance(unit, str) and unit in _UNITS):
        raise ConfigurationError(f"{what}, not {given!r}")
    return f"{whole_number(count, what, 1)}{_UNITS[unit]}"

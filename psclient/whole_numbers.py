"""Whole numbers that a caller gives, of any kind of integer."""

import operator

import numpy as np

from psclient.errors import ConfigurationError


def whole_number(value: object, what: str, least: int = 0, most: int | None = None) -> int:
    """Return an integer of any kind, numpy's too, as Python's own; :class:`ConfigurationError` for anything else.

    A ``bool`` is none: it stands there by mistake. ``what`` begins the message.
    """
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        bound = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{what}, {bound}, not {value!r}")
    return number

"""Both forms of a loop, whatever the size of what it works on."""

from unittest import mock

from pscore.jit import compiled


def run_as(form):
    """Have loops that few entries may run as Python run in this form: ``plain`` or ``dispatcher`` (compiled)."""
    return mock.patch.object(compiled, "on", lambda own, entries: getattr(own, form))


FORMS = ("plain", "dispatcher")

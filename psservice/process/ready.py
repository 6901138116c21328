"""Tells the process that started a server which addresses the server has."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress


def tell_ready(descriptor: int, addresses: Mapping[str, object]) -> None:
    """Write the addresses as a line to a descriptor (``--ready-fd``) and close it; its reader may have ended."""
    with suppress(BrokenPipeError), os.fdopen(descriptor, "w") as stream:
        stream.write(json.dumps(addresses) + "\n")

"""Looking after running servers from a terminal.

``calls`` asks the shards, ``fleet`` puts their answers together, ``commands``, ``checkpoints`` and ``drain`` do things,
``top`` looks again and again, ``shown`` and ``frames`` write for people. :func:`call` is one call to one shard.
"""

from psservice.operator.client import OperateError, call

__all__ = ["OperateError", "call"]

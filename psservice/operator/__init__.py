"""Commands for running servers.

``client`` calls the shards, ``fleet`` joins their answers, ``commands`` and ``drain`` act, ``top`` repeats, ``render``
writes for people. :func:`call` is one call to one shard.
"""

from psservice.operator.client import OperateError, call

__all__ = ["OperateError", "call"]

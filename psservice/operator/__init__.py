"""Commands for running servers; :func:`call` is one call to one shard."""

from psservice.operator.client import OperateError, call

__all__ = ["OperateError", "call"]

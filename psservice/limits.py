"""Largest numbers of requests that rooms below the RPC layer keep to as well; docs/protocol.md, *Bounds*."""

MOST_FIRST_VERSION = 1 << 52
"""Highest version at which the count of an uploaded model begins: pushes then never reach the bound of versions."""

MOST_STEP_AHEAD = 1 << 32
"""Iterations that one push of WAGMA may be ahead of the newest: newcomers begin behind it."""

MOST_EPOCH_SEEN = 1 << 31
"""Highest epoch of a generation that a joining worker may report; those that shard 0 assigns may exceed it."""

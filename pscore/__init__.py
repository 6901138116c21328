"""The agreements of worker and server: layout, codecs, frames, stubs."""

import os
import sys

# Both are read when grpc is loaded. Each failed handshake would be a line on stderr, where the errors and the log of
# this package say the same, with advice and in the log's form; and gRPC's handlers for forks
# abort forked processes that never use it, as the workers of a DataLoader.
_was_loaded = "grpc._cython.cygrpc" in sys.modules
_asked = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1" if _was_loaded else "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

grpc_handles_forks = _asked.lower() not in ("0", "f", "false", "n", "no")
"""Whether gRPC has its handlers for forks, because grpc was imported first or the environment asks for them."""

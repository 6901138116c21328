"""The agreements of worker and server: layout, codecs, frames, stubs."""

import os

# Read when grpc is loaded: each failed handshake would be a line on stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

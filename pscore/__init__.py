"""What worker and server must agree on: layout, codecs, frames, stubs."""

import os

os.environ.setdefault(
    "GRPC_VERBOSITY", "ERROR"
)  # read when grpc is loaded: else each failed handshake is a line on stderr

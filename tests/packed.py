"""Layouts as they travel, packed by hand: also those that our own code would not write."""

import zlib

from pscore.wire.v1 import parameter_server_pb2 as pb


def packed(*pieces: pb.ModelLayout, fingerprint: bytes = b"") -> pb.PackedLayout:
    """Pack messages as the pieces of a layout."""
    data = [zlib.compress(piece.SerializeToString(), 1) for piece in pieces]
    return pb.PackedLayout(fingerprint=fingerprint, pieces=data)

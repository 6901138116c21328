"""The protocol: stubs, chunks, codecs, errors."""

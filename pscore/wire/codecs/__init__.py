"""Index and value codecs on host memory, in the calling thread (docs/wire-format.md has the bytes)."""

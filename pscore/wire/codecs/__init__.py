"""Index and value codecs on host memory, in the calling thread (docs/reference/wire-format.md has the bytes)."""

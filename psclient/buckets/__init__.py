"""Tensors that are pushed together: buckets by size, or plans from measured costs (docs/internals/merging.md)."""

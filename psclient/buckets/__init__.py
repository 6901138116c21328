"""Which tensors are pushed together: buckets by size, or plans from measured costs (MGS-SGD, docs/merging.md)."""

"""A worker's step: check, compress, push, pull, apply; in line or overlapped with backward."""

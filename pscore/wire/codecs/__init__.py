"""Index and value codecs: an array to bytes and back, every decoder checking before it allocates.

``index`` writes positions, ``values`` what stands there, and ``cost`` picks the index codec that arrives first. The
bytes of each are in docs/wire-format.md. Everything works on host memory in numpy, or in functions compiled by numba
that use one thread: RPC threads call them.
"""

"""Index and value codecs: arrays to bytes and back. Every decoder checks before it allocates.

``index`` writes positions, ``values`` the numbers at these positions. docs/wire-format.md has the bytes. All codecs
work on host memory in the calling thread: RPC threads call them.
"""

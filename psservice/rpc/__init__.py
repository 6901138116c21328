"""The RPC layer: who calls, within which time and memory, and the translation of messages to calls of the shard."""

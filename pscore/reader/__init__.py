"""Cuts of a model, and the transfer of one shard's part: for followers and relays."""

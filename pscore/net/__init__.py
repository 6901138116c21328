"""Channels, addresses and how shards are found."""

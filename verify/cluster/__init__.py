"""Shards as processes."""

"""The state of a shard, and the records that change it."""

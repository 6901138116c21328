"""What a shard is at one moment of its history, and the records that change it."""

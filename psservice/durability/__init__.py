"""What a shard writes while it serves, and how it begins again from that."""

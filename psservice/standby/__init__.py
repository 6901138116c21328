"""A standby: follows one shard of a server, and serves in its place once it is promoted."""

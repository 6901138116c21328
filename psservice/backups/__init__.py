"""Backups: checkpoints of all shards in a store, written over the network and put into empty data directories."""

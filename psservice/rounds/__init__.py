"""Synchronous rounds: one update of every live worker, and their mean applied once; for runs with rounds only."""

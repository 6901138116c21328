"""Who takes part in a run: leases, bans, the run's settings, checkpoints, upload grants."""

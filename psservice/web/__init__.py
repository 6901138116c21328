"""What a browser and Prometheus see of a shard: metrics, and a page with its status. Read-only, in plain HTTP."""

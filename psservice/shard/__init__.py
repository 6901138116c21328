"""One shard's behaviour without gRPC: joining, pushes, pulls, uploads, rounds, the end of a run."""

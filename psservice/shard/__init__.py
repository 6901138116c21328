"""One shard of a model: parameters, ledger, images of replicas. Pure maths; no gRPC."""

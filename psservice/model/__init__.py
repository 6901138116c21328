"""One shard of a model: parameters, change log, buffers. No gRPC, no files."""

"""One shard of a model: parameters, change log, replies, buffers. No gRPC, no files."""

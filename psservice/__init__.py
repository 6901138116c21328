"""The parameter server: a process that keeps one shard of a model and answers the workers that train it."""

"""WAGMA-SGD: a model for each worker, averaged in groups; for runs of that method only."""

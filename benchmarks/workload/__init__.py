"""What is measured with: layouts, pushes, shards and workers without a model."""

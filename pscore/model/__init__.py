"""A model's flat layout, and what is cut from it: segments, ranges, buffers, checkpoints."""

"""Selection on the host: all tensors of a table in compiled passes."""

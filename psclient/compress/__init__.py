"""From gradients to sparse updates: what a method is, and the selection over all tensors."""

"""Training methods: one file each, the algorithm as pure tensor functions over one tensor's state."""

"""Compare the training methods: the same tasks, the same samples, the same search for learning rates, paired seeds."""

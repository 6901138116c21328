"""Feeds for programs that others write: engines of inference, and trainers of reinforcement learning."""

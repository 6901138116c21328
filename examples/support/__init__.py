"""What the training scripts share: starting processes, methods by name, schedules, progress, evaluation."""

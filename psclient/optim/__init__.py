"""The optimizers, one file a method: its recurrence, and what it adds to the base class."""

"""The commands: ``psservice serve``, ``psservice health`` and what they start."""

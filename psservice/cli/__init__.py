"""The commands of ``psservice``."""

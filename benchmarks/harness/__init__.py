"""Timing, child processes, progress: what every section uses."""

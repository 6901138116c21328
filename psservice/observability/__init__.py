"""Metrics, logs, traffic counts, messages as JSON."""

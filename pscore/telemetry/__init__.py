"""Traces of a step over worker and servers."""

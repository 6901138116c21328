"""Benchmarks: what a step costs on the wire, on the server and on the worker. ``make bench`` runs them all."""

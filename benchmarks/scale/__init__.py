"""A scale model: 1 to 1,000 workers and 1 to 64 shards of a large model, simulated from costs of the same run.

``python -m benchmarks.scale`` measures the costs on this machine, checks the simulation against real runs of 1 to 32
clients, and then varies workers, shards, network, density and compute time. docs/evidence/scale.md has the equations.
"""

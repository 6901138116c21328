"""Answers to pulls: exact differences, and top-k with an image of the worker's replica. No gRPC, no files."""

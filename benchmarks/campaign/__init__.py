"""Campaigns of runs that go on where they were: what is trained, how, and what is told of it."""

"""Cuts: one version of every shard, kept for a while, so that readers get one model. No gRPC, no files.

A cut changes no state, so it is no record: its versions are those of the journal, and a restarted shard has them or
later ones. The apply thread does nothing for it.
"""

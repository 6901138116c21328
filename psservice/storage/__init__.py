"""What survives the process: a journal of what was acknowledged, and snapshots that it is cut behind.

This room knows files and bytes. What the bytes mean is said in :mod:`psservice.recovery.durability`.
"""

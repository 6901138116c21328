"""Generations: which upload of the model a shard holds.

A generation is 64 bits: an *epoch* above (which full upload this is; the coordinator raises it) and a random *nonce*
below (which history of versions this is). Epochs are ordered, so that a late upload cannot overwrite a newer one.
Nonces only differ: two uploads never share a history, even where a restarted server counts epochs from the beginning,
so no replica of one history is ever taken for a replica of another.
"""

import secrets

_NONCE_BITS = 32


def epoch(generation: int) -> int:
    """Return which full upload a generation belongs to; 0 for none."""
    return generation >> _NONCE_BITS


def nonce(generation: int) -> int:
    """Return which history of versions a generation is, among those of its epoch."""
    return generation & ((1 << _NONCE_BITS) - 1)


def next_generation(seen: int) -> int:
    """Return a generation whose epoch is above that of ``seen``: a full upload, handed out by the coordinator."""
    return (epoch(seen) + 1) << _NONCE_BITS | secrets.randbits(_NONCE_BITS)


def sibling_generation(generation: int) -> int:
    """Return one of the same epoch with a history of its own: a shard was filled from a replica, or went back."""
    return epoch(generation) << _NONCE_BITS | secrets.randbits(_NONCE_BITS)

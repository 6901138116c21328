"""Generations: which upload of the model a shard has.

A generation is 64 bits: an *epoch* above and a random *nonce* below. The coordinator raises the epoch with each full
upload, so a late upload cannot overwrite a newer one. The nonce names a history of versions: two uploads never share
one, even if a restarted server counts epochs from the beginning.
"""

import secrets

_NONCE_BITS = 32


def epoch(generation: int) -> int:
    """Return the number of a generation's full upload; 0 for none."""
    return generation >> _NONCE_BITS


def nonce(generation: int) -> int:
    """Return the history of a generation among those of its epoch."""
    return generation & ((1 << _NONCE_BITS) - 1)


def next_generation(seen: int) -> int:
    """Return a generation with the epoch after that of ``seen``, for a full upload."""
    return (epoch(seen) + 1) << _NONCE_BITS | secrets.randbits(_NONCE_BITS)


def sibling_generation(generation: int) -> int:
    """Return a generation of the same epoch with a new history, for a shard that a replica filled or that went back."""
    return epoch(generation) << _NONCE_BITS | secrets.randbits(_NONCE_BITS)

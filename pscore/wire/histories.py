"""What shards know of one another: whether one has lost versions that another has seen.

Shards of one model that were restored from backups of different moments train without an error, each with parameters of
another time. Versions of two shards need not be equal, so they cannot be compared. A shard that has fewer versions of a
history than another shard has seen of that history was taken back, alone.
"""

from collections.abc import Iterable, Sequence

from pscore.wire.v1 import parameter_server_pb2 as pb

MOST_ORIGINS = 8
"""Origins of a history that are kept, the newest."""


def lost_versions(known: pb.ShardHistory, now: pb.ShardHistory, of_teller: Iterable[pb.ShardOrigin] = ()) -> int:
    """Return how many versions of a shard were seen that it has lost; 0 if the histories are unrelated.

    Args:
        known: what was seen of the shard.
        now: the shard, in another history or in the same one, whose versions it still has.
        of_teller: origins of the shard that has seen it. Two shards that went back to one checkpoint belong together.
    """
    for origin in now.origins if known.generation != now.generation else ():
        if origin.generation == known.generation:
            together = origin.checkpoint and any(each.checkpoint == origin.checkpoint for each in of_teller)
            return 0 if together else max(0, known.version - origin.version)
    return 0


def goes_on(origins: Sequence[pb.ShardOrigin], generation: int, version: int) -> bool:
    """Tell whether a history with these origins has all that another one had at a version.

    It does if it has begun with that one there or later, and no history in between was taken back before that version.
    """
    generations = [each.generation for each in origins]
    if generation not in generations:
        return False
    return version <= min(each.version for each in origins[generations.index(generation) :])


def losses(shards: Iterable[tuple[pb.ShardHistory, Iterable[pb.ShardHistory]]]) -> dict[int, int]:
    """Compare shards with what the others know of them.

    Args:
        shards: each with what it knows of the others.

    Returns:
        The most versions that each shard has lost, by its index; those without a loss are left out.
    """
    told = [(shard, [*known]) for shard, known in shards]
    now = {shard.shard_index: shard for shard, _ in told}
    found: dict[int, int] = {}
    for shard, others in told:
        for known in others:
            index = known.shard_index
            lost = max(known.lost_versions, lost_versions(known, now[index], shard.origins) if index in now else 0)
            if lost > found.get(index, 0):
                found[index] = lost
    return found

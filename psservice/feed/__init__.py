"""Versions that are staged, then published: of feeds, which are trained elsewhere, and of relays. No gRPC, no files.

A feed's publisher is the run's one worker. A publication is a push of words to every shard, each of which stages it; a
relay's shards stage what they fetch. Shard 0 then publishes it by a record, and the other shards follow. So no reader
gets a part of one, whatever dies in between.
"""

"""Feeds: models that are trained elsewhere, and published here version by version. No gRPC, no files.

The publisher is the run's one worker. A publication is a push of words to every shard, each of which stages it; shard 0
then publishes it by a record, and the other shards follow. So no reader gets a part of one, whatever dies in between.
"""

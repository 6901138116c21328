"""The health of all shards of a command: what one process writes, the others read."""

import os

from hypothesis import given
from hypothesis import strategies as st

from psservice.process.shared_health import SharedHealth

STATES = st.tuples(st.booleans(), st.booleans(), st.booleans())


@given(st.lists(STATES, min_size=1, max_size=8))
def test_all_serve_where_each_does_and_one_broken_shard_is_enough(states):
    health = SharedHealth(len(states))
    for shard, (has_started, serves, is_broken) in enumerate(states):
        health.note(shard, has_started=has_started, serves=serves, is_broken=is_broken)
    assert health.all_have_started == all(has_started for has_started, _, _ in states)
    assert health.all_serve == all(serves for _, serves, _ in states)
    assert health.is_broken == any(is_broken for _, _, is_broken in states)
    assert [health.has_started(shard) for shard in range(len(states))] == [started for started, _, _ in states]
    assert not health.all_count_all
    for shard in range(len(states)):
        health.note_counts_all(shard)
    assert health.all_count_all


def test_a_forked_process_writes_what_its_parent_reads():
    health = SharedHealth(2)
    pid = os.fork()
    if not pid:
        health.note(1, has_started=True, serves=True, is_broken=False)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (health.has_started(0), health.has_started(1)) == (False, True)


def test_standbys_serve_together_once_each_has_a_model():
    health = SharedHealth(2)
    health.note(0, has_started=True, serves=False, is_broken=False)
    health.note(1, has_started=True, serves=False, is_broken=False)
    health.note_has_model(0)
    assert not health.all_have_models
    health.note_has_model(1)
    health.note_counts_all(1)
    assert health.all_have_models
    health.note(1, has_started=False, serves=False, is_broken=False)
    assert not health.all_have_models, "its process has ended"

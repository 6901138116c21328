"""Generations: epochs rise, nonces tell histories apart, and both fit the protocol's 64 bits."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.wire.generation import epoch, next_generation, sibling_generation
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.tiers import examples

generations = st.builds(lambda epoch, nonce: epoch << 32 | nonce, st.integers(0, 2**32 - 2), st.integers(0, 2**32 - 1))
some = settings(deadline=None, max_examples=examples(50))


@given(generations)
@some
def test_the_next_upload_has_the_next_epoch(seen):
    assert epoch(next_generation(seen)) == epoch(seen) + 1
    assert next_generation(seen) > seen


@given(generations)
@some
def test_a_sibling_has_the_same_epoch(generation):
    assert epoch(sibling_generation(generation)) == epoch(generation)


@given(generations)
@some
def test_every_generation_travels(seen):
    for generation in (next_generation(seen), sibling_generation(seen)):
        assert pb.PullDiffRequest(generation=generation).generation == generation


def test_there_is_no_generation_before_the_first():
    assert epoch(0) == 0
    assert epoch(next_generation(0)) == 1


def test_two_histories_differ():
    assert len({next_generation(0) for _ in range(20)}) > 1
    first = next_generation(0)
    assert len({sibling_generation(first) for _ in range(20)}) > 1
